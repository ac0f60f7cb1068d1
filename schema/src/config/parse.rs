//! (in progress)
use super::{Config, Problem};

/// Parses the file.
pub fn parse(_text: &str, _file: &str, _env: &dyn Fn(&str) -> Option<String>) -> Result<Config, Vec<Problem>> {
    Err(Vec::new())
}
