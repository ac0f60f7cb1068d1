//! Fields that take any JSON: what is not of the expected type counts as absent, and nothing is built from it.

use std::borrow::Cow;
use std::fmt;

use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

/// Keys whose values say what stands beside them and are no output themselves.
const LABELS: [&str; 6] = ["type", "role", "id", "call_id", "status", "phase"];

/// A text, borrowed where it has no escapes.
#[derive(Debug, Default)]
pub(super) struct Text<'a>(Option<Cow<'a, str>>);

impl Text<'_> {
    /// The text, where it is one and not empty.
    pub(super) fn get(&self) -> Option<&str> {
        self.0.as_deref().filter(|text| !text.is_empty())
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for Text<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ReadText)
    }
}

struct ReadText;

impl<'de> Visitor<'de> for ReadText {
    type Value = Text<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any value")
    }

    fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Text<'de>, E> {
        Ok(Text(Some(Cow::Borrowed(text))))
    }

    fn visit_str<E>(self, text: &str) -> Result<Text<'de>, E> {
        Ok(Text(Some(Cow::Owned(text.to_owned()))))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Text<'de>, A::Error> {
        while items.next_element::<IgnoredAny>()?.is_some() {}
        Ok(Text(None))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Text<'de>, A::Error> {
        while entries.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(Text(None))
    }

    fn visit_unit<E>(self) -> Result<Text<'de>, E> {
        Ok(Text(None))
    }

    fn visit_bool<E>(self, _: bool) -> Result<Text<'de>, E> {
        Ok(Text(None))
    }

    fn visit_i64<E>(self, _: i64) -> Result<Text<'de>, E> {
        Ok(Text(None))
    }

    fn visit_u64<E>(self, _: u64) -> Result<Text<'de>, E> {
        Ok(Text(None))
    }

    fn visit_f64<E>(self, _: f64) -> Result<Text<'de>, E> {
        Ok(Text(None))
    }
}

/// A count: a number that is whole and not negative.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Count(pub(super) Option<u64>);

impl<'de> Deserialize<'de> for Count {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let raw = <&RawValue>::deserialize(deserializer)?.get();
        // Some relays compute in floating point and send `12.0`.
        Ok(Self(raw.strip_suffix(".0").unwrap_or(raw).parse().ok()))
    }
}

/// How many characters of text a value holds, in whatever nesting; labels do not count.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Chars(pub(super) u64);

impl<'de> Deserialize<'de> for Chars {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(CountChars)
    }
}

struct CountChars;

impl<'de> Visitor<'de> for CountChars {
    type Value = Chars;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any value")
    }

    fn visit_str<E>(self, text: &str) -> Result<Chars, E> {
        Ok(Chars(text.chars().count() as u64))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Chars, A::Error> {
        let mut chars = 0;
        while let Some(Chars(more)) = items.next_element()? {
            chars += more;
        }
        Ok(Chars(chars))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Chars, A::Error> {
        let mut chars = 0;
        while let Some((IsLabel(label), Chars(more))) = entries.next_entry()? {
            chars += if label { 0 } else { more };
        }
        Ok(Chars(chars))
    }

    fn visit_unit<E>(self) -> Result<Chars, E> {
        Ok(Chars(0))
    }

    fn visit_bool<E>(self, _: bool) -> Result<Chars, E> {
        Ok(Chars(0))
    }

    fn visit_i64<E>(self, _: i64) -> Result<Chars, E> {
        Ok(Chars(0))
    }

    fn visit_u64<E>(self, _: u64) -> Result<Chars, E> {
        Ok(Chars(0))
    }

    fn visit_f64<E>(self, _: f64) -> Result<Chars, E> {
        Ok(Chars(0))
    }
}

/// Whether a key is a label.
struct IsLabel(bool);

impl<'de> Deserialize<'de> for IsLabel {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visit;
        impl Visitor<'_> for Visit {
            type Value = IsLabel;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a key")
            }

            fn visit_str<E>(self, key: &str) -> Result<IsLabel, E> {
                Ok(IsLabel(LABELS.contains(&key)))
            }
        }
        deserializer.deserialize_str(Visit)
    }
}

/// Reads `raw` as a `T`, or nothing at all.
pub(super) fn part<'a, T: Deserialize<'a> + Default>(raw: Option<&'a RawValue>) -> T {
    raw.and_then(|raw| serde_json::from_str(raw.get()).ok()).unwrap_or_default()
}
