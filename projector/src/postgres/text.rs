//! Text as Postgres can hold it: nothing that a client or an upstream writes may cost a row or its neighbours.
//!
//! Postgres refuses U+0000, and an index refuses an entry of more than about 2,700 bytes. (A lone surrogate, which it
//! would refuse as well, cannot be in text here: where a line has one it cannot be decoded, and rests in quarantine as
//! bytes.) Such a text is changed so that everybody sees it, and so that two that differed still do: its beginning, each
//! U+0000 as U+FFFD, then `…[changed: N bytes, sum H]` with the length and the sum of the original.

use std::borrow::Cow;

use waybill_schema::secret::sum128;

/// The longest text that is stored as it is, in bytes: an index over three of them stays far from its limit.
pub(super) const TEXT_BYTES_MAX: usize = 512;

/// `text` where Postgres can hold it, else what stands for it.
pub(super) fn storable(text: &str) -> Cow<'_, str> {
    if text.len() <= TEXT_BYTES_MAX && !text.contains('\0') {
        return Cow::Borrowed(text);
    }
    let mark = format!("…[changed: {} bytes, sum {}]", text.len(), sum128(&[text.as_bytes()]));
    let end = text.floor_char_boundary(TEXT_BYTES_MAX - mark.len() * 2);
    Cow::Owned(text[..end].replace('\0', "\u{fffd}") + &mark)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_that_postgres_holds_stays_as_it_is() {
        for text in ["", "gpt", "größer 🦀", &"x".repeat(512)] {
            assert_eq!(storable(text), text);
        }
    }

    /// The sum is the beginning of `printf 'a\0b' | sha256sum`.
    #[test]
    fn text_that_it_refuses_is_changed_and_says_so() {
        assert_eq!(storable("a\0b"), "a\u{fffd}b…[changed: 3 bytes, sum 59b271ae1bbcb1d31d41929817f4b16f]");
        let (long, other) = ("ü".repeat(1000), "ü".repeat(999) + "u");
        let kept = storable(&long);
        assert!(
            kept.starts_with("üüü") && kept.contains("…[changed: 2000 bytes, sum ") && kept.len() <= TEXT_BYTES_MAX
        );
        assert_ne!(kept, storable(&other));
    }
}
