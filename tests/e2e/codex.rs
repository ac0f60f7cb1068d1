//! The Codex CLI works through the gateway: a command it is told to run, its output sent back, the session resumed.

use std::net::SocketAddr;
use std::path::Path;

use serde_json::{Value, json};
use tempfile::TempDir;
use waybill_simulator::{Action, Call, Control, Step};

use crate::fleet::ready_when;
use crate::program::{facts, installed, program, run};
use crate::wiretap::Wiretap;
use crate::world::{KEY, Plan, World};

/// A user's folder with Codex's settings and a project in it, and a proxy that nobody may call.
struct Desk {
    home: TempDir,
    outside: Wiretap,
}

impl Desk {
    /// `provider` is what the settings say of where requests go.
    async fn new(provider: &str, sections: &str) -> Self {
        let home = TempDir::new().expect("a temporary folder can be made");
        // Everything off by which Codex asks elsewhere: updates, analytics, feedback, the market of plugins.
        let settings = format!(
            "model = \"gpt\"\n{provider}\ncheck_for_update_on_startup = false\napproval_policy = \"never\"\n\
             sandbox_mode = \"danger-full-access\"\n[analytics]\nenabled = false\n[feedback]\nenabled = false\n\
             [features]\nplugins = false\n{sections}"
        );
        let project = home.path().join("project");
        std::fs::create_dir(&project).expect("the project's folder can be made");
        std::fs::write(home.path().join("config.toml"), settings).expect("the settings can be written");
        run(program(Path::new("git"), home.path()).args(["init", "--quiet"]).arg(&project)).await;
        Self { home, outside: Wiretap::trap().await }
    }

    /// One whose provider is the gateway at `addr`.
    async fn at(addr: SocketAddr) -> Self {
        let section = format!(
            "[model_providers.waybill]\nname = \"Waybill\"\nbase_url = \"http://{addr}/v1\"\nwire_api = \"responses\"\n\
             env_key = \"WAYBILL_KEY\"\n"
        );
        Self::new("model_provider = \"waybill\"", &section).await
    }

    /// Runs `codex exec` in the project and gives what it tells, an event a line.
    async fn exec(&self, args: &[&str]) -> Vec<Value> {
        let proxy = format!("http://{}", self.outside.addr);
        let home = self.home.path();
        let mut codex = program(&installed("codex/node_modules/.bin/codex"), home);
        codex.arg("exec").args(args).arg("--json").current_dir(home.join("project"));
        codex.env("CODEX_HOME", home).env("WAYBILL_KEY", KEY).env("CODEX_API_KEY", KEY).env("NO_PROXY", "127.0.0.1");
        codex.envs(["HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"].map(|name| (name, proxy.clone())));
        facts(&run(&mut codex).await)
    }

    /// A conversation of two turns, the first of them with a command to run; gives Codex's id of it.
    async fn converse(&self) -> String {
        // The shell works out what the prompt does not say.
        let told =
            self.exec(&["--strict-config", r#"call tool exec_command with {"cmd":"echo it-is-$((6*7))"}"#]).await;
        let started = told.iter().find(|event| event["type"] == "thread.started").expect("a conversation has begun");
        let id = started["thread_id"].as_str().expect("a conversation has an id").to_owned();
        check_told(&told);
        check_told(&self.exec(&["resume", &id, "And how are you?"]).await);
        id
    }
}

fn check_told(told: &[Value]) {
    let last = told.last().expect("Codex tells something");
    assert_eq!(last["type"], "turn.completed", "{told:#?}");
}

/// The three calls of a conversation are on one upstream; from the second on they hold the command's output.
fn check_calls(world: &World, conversation: &str) {
    let of_it = |call: &Call| call.json()["prompt_cache_key"] == conversation;
    let upstreams = world.upstreams.iter().map(|upstream| upstream.calls().into_iter().filter(of_it).collect());
    let served: Vec<Vec<Call>> = upstreams.filter(|calls: &Vec<Call>| !calls.is_empty()).collect();
    assert_eq!(served.len(), 1, "{conversation} was served by {} upstreams", served.len());
    let outputs = |call: &Call| call.body.windows(8).any(|bytes| bytes == b"it-is-42");
    assert_eq!(served[0].iter().map(outputs).collect::<Vec<_>>(), [false, true, true]);
}

/// Two conversations in one folder, whose first messages are the same, are two sessions by their `prompt_cache_key`.
#[tokio::test]
async fn codex_keeps_its_deployment_over_tool_calls_and_resume() {
    let mut world = World::start(Plan::of(&["a", "b", "c"])).await;
    let desk = Desk::at(world.addr()).await;
    let conversations = [desk.converse().await, desk.converse().await];
    conversations.iter().for_each(|conversation| check_calls(&world, conversation));
    assert_eq!(desk.outside.notes(), Vec::<String>::new(), "Codex asked elsewhere");

    world.stop().await;
    let rounds = "SELECT json_array(session_source, signal, outcome, count(*), count(DISTINCT deployment), sum(sticky_hit)) \
                  FROM usage_events GROUP BY session_id, session_source, signal, outcome";
    let database = world.database();
    let mut statement = database.prepare(rounds).expect("the log has usage");
    let rows = statement.query_map([], |row| row.get::<_, String>(0)).expect("usage can be read");
    let rows: Vec<Value> = rows.flat_map(|row| facts(&row.expect("a row is text"))).collect();
    let session = json!(["cache_key", "body:prompt_cache_key", "success", 3, 1, 2]);
    assert_eq!(rows, [session.clone(), session]);
}

/// Its built-in provider asks for a WebSocket first, is told 426, and posts.
#[tokio::test]
async fn codex_falls_back_from_websocket_to_post() {
    let world = World::start(Plan::of(&["a", "b", "c"])).await;
    let wire = Wiretap::on(world.addr()).await;
    let desk = Desk::new(&format!("openai_base_url = \"http://{}/v1\"", wire.addr), "").await;
    let conversation = desk.converse().await;
    check_calls(&world, &conversation);
    assert_eq!(desk.outside.notes(), Vec::<String>::new(), "Codex asked elsewhere");
    let refused = "GET /v1/responses HTTP/1.1 -> HTTP/1.1 426 Upgrade Required";
    let answered = "POST /v1/responses HTTP/1.1 -> HTTP/1.1 200 OK";
    assert_eq!(wire.notes(), [refused, answered, answered, refused, answered]);
}

/// Issue 5: with the owner of its conversation gone Codex, which sends the whole of it, goes on elsewhere at once.
#[tokio::test]
async fn codex_goes_on_elsewhere_when_its_owner_is_gone() {
    let world = World::start(Plan::of(&["a", "b", "c"])).await;
    let wire = Wiretap::on(world.addr()).await;
    let desk = Desk::at(wire.addr).await;
    let conversation = desk.converse().await;
    let owner = ["a", "b", "c"].into_iter().find(|name| !world.upstream(name).calls().is_empty());
    let owner = owner.expect("the conversation was served");
    let text = std::fs::read_to_string(world.config()).expect("the configuration can be read");
    let channel = format!("{{ id: {owner}, ");
    let without = text.replace(&channel, &format!("{channel}status: disabled, "));
    std::fs::write(world.config(), without).expect("the configuration can be written");
    ready_when(&world.client(), |ready| ready["detail"]["catalogue"]["revision"] == 2).await;
    check_told(&desk.exec(&["resume", &conversation, "And what now?"]).await);
    let answered = "POST /v1/responses HTTP/1.1 -> HTTP/1.1 200 OK";
    assert_eq!(wire.notes(), [answered; 4], "one request a step, and none again");
    assert_eq!((world.upstream(owner).calls().len(), world.calls().len()), (3, 4));
}

/// Issue 5: "the Codex CLI finishes a multi-turn tool task while a sibling deployment fails under it": whichever of two it
/// is, and also the one that it was on, Codex asks once a step and notices nothing.
#[tokio::test]
async fn codex_finishes_its_task_while_a_sibling_fails() {
    let fails = || Step::new([Action::status(503)]).standing();
    for failing in ["a", "b"] {
        // Nobody rests: the one that failed first is well again when the other one fails.
        let plan = Plan::of(&["a", "b"]).settings("retry: { backoff_ms: 1 }\nhealth: { enabled: false }\n");
        let world = World::start(plan).await;
        world.upstream(failing).push(fails());
        let wire = Wiretap::on(world.addr()).await;
        let desk = Desk::at(wire.addr).await;
        let conversation = desk.converse().await;
        let (well, other) = if failing == "a" { ("b", "a") } else { ("a", "b") };
        assert_eq!(world.upstream(well).calls().len(), 3);
        world.upstream(well).push(fails());
        world.upstream(other).apply(Control { clear_steps: true, ..Control::default() });
        check_told(&desk.exec(&["resume", &conversation, "And what now?"]).await);
        let answered = "POST /v1/responses HTTP/1.1 -> HTTP/1.1 200 OK";
        assert_eq!(wire.notes(), [answered; 4], "one request a step, and none again");
        let last = world.upstream(other).calls().pop().expect("the other one was called");
        assert_eq!((last.status, last.terminal), (Some(200), true));
    }
}
