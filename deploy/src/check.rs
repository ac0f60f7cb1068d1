//! `waybill check FILE`: everything that is wrong with a configuration file, at once.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use waybill_schema::config::{self, Config};

use crate::table;

/// Validate a configuration file.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// The file
    file: PathBuf,
    /// Print the problems as JSON lines
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    match read(&args.file)? {
        Ok(config) => {
            config.warnings.iter().try_for_each(|warning| table::say(line(warning, "warning", args.json)))?;
            if args.json {
                return Ok(());
            }
            table::say(format_args!("{}: fine, {} catalogue rows", args.file.display(), config.rows.len()))
        }
        Err(problems) => {
            problems.iter().try_for_each(|problem| table::say(line(problem, "error", args.json)))?;
            bail!("{} has {} problem(s)", args.file.display(), problems.len());
        }
    }
}

/// Reads and parses a configuration file with this process's environment.
pub(crate) fn read(file: &Path) -> anyhow::Result<Result<Config, Vec<config::Problem>>> {
    let text = std::fs::read_to_string(file).with_context(|| format!("{} cannot be read", file.display()))?;
    Ok(config::parse(&text, &file.display().to_string(), &|name| std::env::var(name).ok()))
}

/// As [`read`], but problems are an error that names them all.
pub(crate) fn load(file: &Path) -> anyhow::Result<Config> {
    read(file)?.map_err(|problems| {
        let lines: Vec<String> = problems.iter().map(ToString::to_string).collect();
        anyhow::anyhow!("the configuration has {} problem(s):\n  {}", lines.len(), lines.join("\n  "))
    })
}

fn line(problem: &config::Problem, kind: &str, json: bool) -> String {
    if !json {
        return format!("{kind}: {problem}");
    }
    serde_json::json!({
        "kind": kind,
        "file": problem.file,
        "line": problem.line,
        "column": problem.column,
        "field": problem.field,
        "message": problem.message,
    })
    .to_string()
}
