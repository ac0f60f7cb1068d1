//! The one spelling of our kinds: the word that stands for a variant in the log also stands in rows, tables and texts.

use std::fmt;

use serde::Serialize;

/// Shows a unit variant as the log spells it, such as `rate_limited`.
#[derive(Clone, Copy, Debug)]
pub struct Word<T>(pub T);

impl<T: Serialize> fmt::Display for Word<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.serialize(f)
    }
}

#[cfg(test)]
mod tests {
    use waybill_schema::event::{Class, Endpoint, Reason};

    use super::*;

    #[test]
    fn a_variant_is_spelled_as_in_the_log() {
        let words = [Word(Class::Upstream5xx).to_string(), Word(Reason::LastResort).to_string()];
        assert_eq!(words, ["upstream5xx", "last_resort"]);
        assert_eq!(Word(Endpoint::CountTokens).to_string(), "count_tokens");
    }
}
