//! Tidy rules: what the house promises about its own shape (DESIGN.md, section 3), read from its files.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Which crates each crate may use; `tests` may use all and is used by none.
const EDGES: &[(&str, &[&str])] = &[
    ("waybill-schema", &[]),
    ("waybill-events", &["waybill-schema"]),
    ("waybill-routing", &["waybill-schema"]),
    ("waybill-projections", &["waybill-schema", "waybill-routing"]),
    ("waybill-gateway", &["waybill-schema", "waybill-routing", "waybill-events"]),
    ("waybill-projector", &["waybill-schema", "waybill-projections", "waybill-routing", "waybill-events"]),
    ("waybill-auditor", &["waybill-schema", "waybill-routing", "waybill-projections", "waybill-events"]),
    ("waybill-simulator", &[]),
    ("waybill-servers", &[]),
];

/// What a pure crate may not even name: IO, clocks, dice, tasks (DESIGN.md, promise 7).
const IMPURE: &[&str] = &[
    "std::fs",
    "std::net",
    "std::process",
    "std::thread",
    "std::env",
    "SystemTime::now",
    "Instant::now",
    "tokio",
    "new_v4",
    "now_v7",
    "rand::",
    "println!",
    "tracing::",
];

#[test]
fn crates_depend_only_along_the_edges_of_the_house() {
    let manifests = manifests();
    for (name, allowed) in EDGES {
        let manifest = &manifests[*name];
        let dependencies = manifest.get("dependencies").and_then(toml::Value::as_table);
        let ours = dependencies.into_iter().flat_map(|table| table.keys()).filter(|name| name.starts_with("waybill"));
        let stray: Vec<_> = ours.filter(|dependency| !allowed.contains(&dependency.as_str())).collect();
        assert!(stray.is_empty(), "{name} depends on {stray:?}, beyond the edges of DESIGN.md section 3");
    }
    for (name, manifest) in &manifests {
        let dependencies = manifest.get("dependencies").and_then(toml::Value::as_table);
        let imports = |other: &str| dependencies.is_some_and(|table| table.contains_key(other));
        // The benches are tests, too: they start real servers.
        let ends = ["waybill", "waybill-tests", "waybill-servers", "waybill-world"].into_iter();
        let stray = ends
            .filter(|other| (&name[..], *other) != ("waybill-bench", "waybill-servers"))
            .find(|other| imports(other));
        assert!(stray.is_none(), "{name} imports {stray:?}: the binary and the tests are at the end of every edge");
    }
}

#[test]
fn pure_crates_name_no_io_clock_or_dice() {
    for folder in ["gateway/routing/src", "projector/projections/src"] {
        for file in sources(&root().join(folder)) {
            let text = read(&file);
            let code = text.split("#[cfg(test)]").next().unwrap_or_default();
            let lines = code.lines().map(str::trim_start).filter(|line| !line.starts_with("//"));
            for line in lines {
                let found = IMPURE.iter().find(|word| line.contains(**word));
                assert!(found.is_none(), "{}: {found:?} in a pure crate: {line}", file.display());
            }
        }
    }
}

#[test]
fn every_source_file_says_what_it_is() {
    for file in our_sources() {
        let text = read(&file);
        assert!(text.starts_with("//!"), "{} does not begin with a //! sentence", file.display());
    }
}

#[test]
fn no_file_is_called_after_nothing() {
    for file in our_sources() {
        let stem = file.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
        let empty_word = ["utils", "util", "helpers", "common", "manager", "misc"].contains(&stem);
        assert!(!empty_word, "{} is not named after a subject", file.display());
    }
}

#[test]
fn no_test_sleeps_or_is_skipped() {
    let tests = our_sources().into_iter().filter(|file| {
        let path = file.to_string_lossy();
        path.contains("/tests/") && !path.ends_with("tidy/main.rs")
    });
    for file in tests {
        let text = read(&file);
        for word in ["sleep(", "#[ignore", "todo!(", "unimplemented!("] {
            assert!(!text.contains(word), "{} has {word}", file.display());
        }
    }
}

#[test]
fn every_decision_record_is_one_numbered_page() {
    let mut numbers = Vec::new();
    for entry in std::fs::read_dir(root().join("docs/adr")).expect("docs/adr exists") {
        let name = entry.expect("an entry can be read").file_name().to_string_lossy().into_owned();
        let number: usize = name.get(..4).and_then(|digits| digits.parse().ok()).expect("an ADR is NNNN-title.md");
        numbers.push(number);
    }
    numbers.sort_unstable();
    assert!(numbers.iter().enumerate().all(|(index, number)| index + 1 == *number), "ADRs are numbered {numbers:?}");
}

/// `docs/behaviour.md` says of each rule which test shows it, by module and name.
#[test]
fn every_test_that_the_behaviour_page_names_is_there() {
    let tests = our_sources().into_iter().map(|file| (file.with_extension(""), read(&file)));
    let tests: Vec<(PathBuf, String)> = tests.filter(|(_, text)| text.contains("test]")).collect();
    let page = read(&root().join("docs/behaviour.md"));
    let names = page.split('`').skip(1).step_by(2).filter(|word| word.matches('_').count() > 2);
    let missing: Vec<&str> =
        names.filter(|name| !tests.iter().any(|(file, text)| is_test_of(file, text, name))).collect();
    assert!(missing.is_empty(), "no such tests: {missing:#?}");
}

/// Whether `path`, a test's name behind its modules, is in the text of `file`.
fn is_test_of(file: &Path, text: &str, path: &str) -> bool {
    let (modules, name) = path.rsplit_once("::").unwrap_or(("", path));
    file.ends_with(modules.replace("::", "/")) && text.contains(&format!("fn {name}("))
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the tests lie in the workspace").to_owned()
}

fn manifests() -> BTreeMap<String, toml::Table> {
    let workspace: toml::Table = read(&root().join("Cargo.toml")).parse().expect("the workspace manifest is TOML");
    let members = workspace["workspace"]["members"].as_array().expect("members is a list");
    let manifest = |member: &toml::Value| {
        let path = root().join(member.as_str().expect("a member is text")).join("Cargo.toml");
        let table: toml::Table = read(&path).parse().expect("a manifest is TOML");
        (table["package"]["name"].as_str().expect("a package has a name").to_owned(), table)
    };
    members.iter().map(manifest).collect()
}

fn our_sources() -> Vec<PathBuf> {
    let folders = ["schema", "events", "gateway", "projector", "auditor", "deploy", "tests"];
    folders.iter().flat_map(|folder| sources(&root().join(folder))).collect()
}

fn sources(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display())) {
        let path = entry.expect("an entry can be read").path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if path.is_dir() && name != "target" && !name.starts_with('.') {
            found.extend(sources(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
    found
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}
