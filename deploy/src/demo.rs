//! The demo: a catalogue over two simulated providers with prompt caches, for a first look without any account.

use std::fmt::Write;
use std::net::SocketAddr;
use std::path::Path;

use anyhow::anyhow;
use waybill_schema::config::{self, Config};
use waybill_simulator::cache::CacheModel;
use waybill_simulator::{Running, Settings, Simulator};

use crate::data;

/// The ports that the simulated providers like to have, so that a restart finds the same catalogue.
const PORTS: [u16; 2] = [4001, 4002];
const NAMES: [&str; 2] = ["east", "west"];

/// The running demo.
pub(crate) struct Demo {
    /// The configuration over its providers.
    pub(crate) config: Config,
    /// The caller's secret.
    pub(crate) key: String,
    providers: Vec<Running>,
}

/// Starts the providers and makes the configuration; secrets lie in the data folder.
pub(crate) async fn start(data: &Path) -> anyhow::Result<Demo> {
    let key = data::secret(data, "demo.key", "sk-demo-")?;
    data::secret(data, "demo-upstream.key", "sk-upstream-")?;
    let mut providers = Vec::new();
    for (name, port) in NAMES.into_iter().zip(PORTS) {
        providers.push(provider(name, port).await?);
    }
    let text = yaml(data, &providers);
    let config = config::parse(&text, "demo", &|name| std::env::var(name).ok());
    let config = config.map_err(|problems| {
        anyhow!("the demo's configuration: {}", problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))
    })?;
    Ok(Demo { config, key, providers })
}

async fn provider(name: &str, port: u16) -> std::io::Result<Running> {
    let settings = Settings {
        models: vec!["demo-model".to_owned()],
        first_token_delay_ms: 30,
        chunk_delay_ms: 15,
        cache: CacheModel::open_ai(),
        ..Settings::named(name)
    };
    let liked = SocketAddr::from(([127, 0, 0, 1], port));
    match Simulator::new(settings.clone()).start_at(liked).await {
        Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => Simulator::start(settings).await,
        started => started,
    }
}

fn yaml(data: &Path, providers: &[Running]) -> String {
    let mut text = String::from("catalogue:\n  channels:\n");
    for (name, provider) in NAMES.iter().zip(providers) {
        let file = data.join("demo-upstream.key");
        writeln!(
            text,
            "    - id: {name}\n      base_url: http://{}/v1\n      dialects: [chat, responses, messages, embeddings]\n      \
             api_keys: ['file:{}']\n      models: [demo-model]",
            provider.addr,
            file.display(),
        )
        .expect("a string takes every write");
    }
    text.push_str("  groups:\n    - { id: demo, display_name: Demo, public_models: [demo-model] }\n");
    text.push_str("  routes:\n    - model: demo-model\n      members:\n");
    for name in NAMES {
        writeln!(text, "        - {{ channel: {name}, group: demo, priority: 10, weight: 100 }}")
            .expect("a string takes every write");
    }
    let key = data.join("demo.key");
    writeln!(text, "  keys:\n    - {{ id: demo, key: 'file:{}', group: demo, expose_route: true }}", key.display())
        .expect("a string takes every write");
    text
}

impl Demo {
    /// What a newcomer can try, as text.
    pub(crate) fn greeting(&self, listen: SocketAddr, data: &Path) -> String {
        let Self { key, providers, .. } = self;
        let data = data.display();
        let (first, second) = (providers[0].addr, providers[1].addr);
        format!(
            r#"
waybill is up at http://{listen}

Two simulated providers stand behind it, {east} and {west}. A first request:

  curl -i http://{listen}/v1/chat/completions -H 'authorization: Bearer {key}' -H 'content-type: application/json' \
    -H 'x-session-id: hello' -d '{{"model":"demo-model","messages":[{{"role":"user","content":"Hello"}}]}}'

The reply's X-Waybill-Deployment says who served; repeat it and the session stays there.
Add "stream":true to see it streamed. Then, in another terminal:

  waybill sessions --data {data}                 the session's rounds
  waybill explain REQUEST --data {data}          why one of them went there (X-Waybill-Request-Id)
  curl -X POST http://{first}/__control -d '{{"steps":[{{"times":null,"does":[{{"status":{{"status":503}}}}]}}]}}'
                                                 break {east} ({west} is at {second})
  waybill health --data {data}                   who cools down, until when and why

Ask again with the same session: it moves once, and stays moved when the provider is mended:

  curl -X POST http://{first}/__control -d '{{"clear_steps":true}}'
"#,
            east = NAMES[0],
            west = NAMES[1],
        )
    }

    /// Ends the providers.
    pub(crate) async fn stop(&self) {
        for provider in &self.providers {
            provider.stop().await;
        }
    }
}
