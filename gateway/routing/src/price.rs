//! What a send cost: its tokens at the prices of the model that it was sent to.

use waybill_schema::catalogue::Price;
use waybill_schema::event::{Class, Tokens, Usage};

/// What a send with this `usage` cost that ended as `class`, in nano-USD, rounded to the nearest; `None` where neither
/// the prompt nor the answer has a count that may be priced.
///
/// Cached and written tokens are part of the prompt and cost their own price there. What a failed send has used is
/// priced only where the upstream reported it: an estimate would be a guess at somebody's money (DESIGN.md, section 10).
pub fn cost_nano(price: &Price, usage: &Usage, class: Class) -> Option<u64> {
    let is_answer = matches!(class, Class::Success | Class::Incomplete | Class::ContentPolicy);
    let count = |tokens: Tokens| match tokens {
        Tokens::Reported(n) => Some(n),
        Tokens::Estimated(n) if is_answer => Some(n),
        Tokens::Estimated(_) | Tokens::Unknown => None,
    };
    let (input, output) = (count(usage.input), count(usage.output));
    input.or(output)?;
    let prompt = input.unwrap_or(0);
    let cached = count(usage.cached).unwrap_or(0).min(prompt);
    let written = count(usage.cache_write).unwrap_or(0).min(prompt - cached);
    let parts = [
        (prompt - cached - written, price.input),
        (cached, price.cached.unwrap_or(price.input)),
        (written, price.cache_write.unwrap_or(price.input)),
        (output.unwrap_or(0), price.output),
    ];
    let thousandfold: u128 = parts.iter().map(|(tokens, rate)| u128::from(*tokens) * u128::from(*rate)).sum();
    Some(u64::try_from((thousandfold + 500) / 1000).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The prices of Claude Sonnet: 3 USD a million in, 15 out, 0.3 read from the cache, 3.75 written to it. All sums
    /// are made by hand.
    #[test]
    fn tokens_cost_what_their_part_of_the_prompt_costs() {
        use Tokens::{Estimated, Reported, Unknown};
        let price = Price {
            model: "m".into(),
            input: 3_000_000,
            output: 15_000_000,
            cached: Some(300_000),
            cache_write: Some(3_750_000),
        };
        let flat = Price { cached: None, cache_write: None, ..price.clone() };
        let usage =
            |input, cached, cache_write, output| Usage { input, output, cached, cache_write, ..Usage::default() };
        let mixed = usage(Reported(1000), Reported(600), Reported(100), Reported(10));
        let guessed = usage(Reported(1000), Unknown, Unknown, Estimated(10));
        let table = [
            // 300 at 3,000 + 600 at 300 + 100 at 3,750 + 10 at 15,000 nano-USD.
            (&price, mixed, Class::Success, Some(1_605_000)),
            (&flat, mixed, Class::Success, Some(3_150_000)),
            (&price, guessed, Class::Success, Some(3_150_000)),
            (&price, guessed, Class::Interrupted, Some(3_000_000)),
            (&price, usage(Unknown, Unknown, Unknown, Estimated(10)), Class::Interrupted, None),
            (&price, Usage::default(), Class::Success, None),
            // A relay that reports more cached than there is.
            (&price, usage(Reported(10), Reported(99), Reported(99), Unknown), Class::Success, Some(3_000)),
        ];
        for (price, usage, class, expected) in table {
            assert_eq!(cost_nano(price, &usage, class), expected, "{usage:?} {class:?}");
        }
        let cheap = Price { input: 1, output: 499, ..flat };
        assert_eq!(cost_nano(&cheap, &usage(Reported(1), Unknown, Unknown, Reported(1)), Class::Success), Some(1));
    }
}
