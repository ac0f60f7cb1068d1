//! Usage objects of both families, as one [`Usage`]: cached and written tokens inside the input, unknown never zero.

use serde::Deserialize;
use serde_json::value::RawValue;
use waybill_schema::event::{Tokens, Usage};

use super::lenient::{Count, part};

/// OpenAI's usage, in the words of Chat and of Responses, and in those of vendors: relays send any of them, or several of
/// which all but one are zero, so the largest counts (PITFALLS F08).
#[derive(Deserialize, Default)]
struct OpenAi<'a> {
    #[serde(default)]
    prompt_tokens: Count,
    #[serde(default)]
    input_tokens: Count,
    #[serde(default)]
    completion_tokens: Count,
    #[serde(default)]
    output_tokens: Count,
    #[serde(borrow, default)]
    prompt_tokens_details: Option<&'a RawValue>,
    #[serde(borrow, default)]
    input_tokens_details: Option<&'a RawValue>,
    #[serde(borrow, default)]
    completion_tokens_details: Option<&'a RawValue>,
    #[serde(borrow, default)]
    output_tokens_details: Option<&'a RawValue>,
    /// Moonshot.
    #[serde(default)]
    cached_tokens: Count,
    /// DeepSeek.
    #[serde(default)]
    prompt_cache_hit_tokens: Count,
}

#[derive(Deserialize, Default)]
struct Details {
    #[serde(default)]
    cached_tokens: Count,
    #[serde(default)]
    cache_write_tokens: Count,
    /// Qwen.
    #[serde(default)]
    cache_creation_input_tokens: Count,
    #[serde(default)]
    reasoning_tokens: Count,
}

#[derive(Deserialize, Default)]
struct Anthropic {
    #[serde(default)]
    input_tokens: Count,
    #[serde(default)]
    output_tokens: Count,
    #[serde(default)]
    cache_read_input_tokens: Count,
    #[serde(default)]
    cache_creation_input_tokens: Count,
}

/// Reads a usage object of Chat, Responses or Embeddings; `None` where there is no object.
pub(super) fn openai(raw: Option<&RawValue>) -> Option<Usage> {
    let raw = raw.filter(|raw| raw.get().starts_with('{'))?;
    let usage: OpenAi<'_> = serde_json::from_str(raw.get()).ok()?;
    let details = |raw| part::<Details>(raw);
    let (prompt, input) = (details(usage.prompt_tokens_details), details(usage.input_tokens_details));
    let (completion, output) = (details(usage.completion_tokens_details), details(usage.output_tokens_details));
    let cached = [prompt.cached_tokens, input.cached_tokens, usage.cached_tokens, usage.prompt_cache_hit_tokens];
    let written =
        [&prompt, &input].map(|details| details.cache_write_tokens.0.max(details.cache_creation_input_tokens.0));
    Some(Usage {
        input: reported(usage.prompt_tokens.0.max(usage.input_tokens.0)),
        output: reported(usage.completion_tokens.0.max(usage.output_tokens.0)),
        cached: reported(cached.into_iter().filter_map(|count| count.0).max()),
        cache_write: reported(written[0].max(written[1])),
        reasoning: reported(completion.reasoning_tokens.0.max(output.reasoning_tokens.0)),
    })
}

/// Adds an Anthropic usage object to what is known: its counts only grow, and relays send zeros before they know.
pub(super) fn anthropic(known: Usage, raw: Option<&RawValue>) -> Usage {
    let more: Anthropic = part(raw);
    let cached = known.cached.known().max(more.cache_read_input_tokens.0);
    let cache_write = known.cache_write.known().max(more.cache_creation_input_tokens.0);
    let cache_before = known.cached.known().unwrap_or(0) + known.cache_write.known().unwrap_or(0);
    let uncached_before = known.input.known().map(|input| input.saturating_sub(cache_before));
    let uncached = uncached_before.max(more.input_tokens.0);
    let in_cache = cached.unwrap_or(0).saturating_add(cache_write.unwrap_or(0));
    Usage {
        input: reported(uncached.map(|uncached| uncached.saturating_add(in_cache))),
        output: reported(known.output.known().max(more.output_tokens.0)),
        cached: reported(cached),
        cache_write: reported(cache_write),
        reasoning: Tokens::Unknown,
    }
}

/// A count as the upstream reported it.
pub(super) fn reported(count: Option<u64>) -> Tokens {
    count.map_or(Tokens::Unknown, Tokens::Reported)
}
