//! JSON for facts, as `serde_json` writes it and faster: names of fields are written as they are, and texts are looked
//! through eight bytes at a time. Each request writes some four facts of a hundred names and texts.
//!
//! What facts seldom hold (texts with escapes, fractions) `serde_json` itself writes.

use serde::ser::{
    Error as _, Serialize, SerializeMap, SerializeSeq, SerializeStruct, SerializeStructVariant, SerializeTuple,
    SerializeTupleStruct, SerializeTupleVariant, Serializer,
};
use serde_json::Error;

/// Writes `value` as JSON at the end of `out`; fails where a key of a map is no text.
pub(crate) fn write<T: Serialize + ?Sized>(value: &T, out: &mut Vec<u8>) -> Result<(), Error> {
    value.serialize(Writer(out))
}

struct Writer<'a>(&'a mut Vec<u8>);

/// An array or an object whose items are being written.
struct Items<'a> {
    out: &'a mut Vec<u8>,
    empty: bool,
    end: &'static [u8],
}

/// Whether `text` stands between quotes as it is.
fn is_plain(text: &[u8]) -> bool {
    let escaped = |byte: u8| byte < 0x20 || byte == b'"' || byte == b'\\';
    let (words, rest) = text.as_chunks::<8>();
    words.iter().all(|word| is_plain_word(u64::from_ne_bytes(*word))) && !rest.iter().copied().any(escaped)
}

/// The same for eight bytes: none is less than a space, a quote or a backslash.
fn is_plain_word(word: u64) -> bool {
    const ONES: u64 = u64::MAX / 0xff;
    const HIGHS: u64 = ONES << 7;
    // The high bit of a byte less than `n` is set (n <= 128), and of no byte where there is none such.
    let less = |word: u64, n: u64| word.wrapping_sub(ONES * n) & !word & HIGHS;
    let equal = |byte: u8| less(word ^ (ONES * u64::from(byte)), 1);
    less(word, 0x20) | equal(b'"') | equal(b'\\') == 0
}

impl<'a> Writer<'a> {
    fn open(self, begin: &[u8], end: &'static [u8]) -> Items<'a> {
        self.0.extend_from_slice(begin);
        Items { out: self.0, empty: true, end }
    }

    /// Opens an object around the one variant that it names.
    fn variant(self, variant: &'static str, begin: &[u8], end: &'static [u8]) -> Items<'a> {
        self.0.push(b'{');
        name(self.0, variant);
        self.open(begin, end)
    }
}

/// A name that stands in the program, and its colon. Inlined, the length of a name is known where it is copied.
#[inline(always)]
fn name(out: &mut Vec<u8>, name: &'static str) {
    debug_assert!(is_plain(name.as_bytes()));
    out.reserve(name.len() + 3);
    out.push(b'"');
    out.extend_from_slice(name.as_bytes());
    out.extend_from_slice(b"\":");
}

impl Items<'_> {
    #[inline(always)]
    fn next(&mut self) {
        if !std::mem::take(&mut self.empty) {
            self.out.push(b',');
        }
    }

    fn item<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), Error> {
        self.next();
        write(value, self.out)
    }

    #[inline(always)]
    fn field<T: Serialize + ?Sized>(&mut self, field: &'static str, value: &T) -> Result<(), Error> {
        self.next();
        name(self.out, field);
        write(value, self.out)
    }

    fn close(self) -> Result<(), Error> {
        self.out.extend_from_slice(self.end);
        Ok(())
    }
}

macro_rules! integers {
    ($($method:ident($integer:ty))*) => {
        $(fn $method(self, n: $integer) -> Result<(), Error> {
            self.0.extend_from_slice(itoa::Buffer::new().format(n).as_bytes());
            Ok(())
        })*
    };
}

macro_rules! rarities {
    ($($method:ident($rarity:ty))*) => {
        $(fn $method(self, value: $rarity) -> Result<(), Error> {
            serde_json::to_writer(self.0, &value)
        })*
    };
}

impl<'a> Serializer for Writer<'a> {
    type Ok = ();
    type Error = Error;
    type SerializeSeq = Items<'a>;
    type SerializeTuple = Items<'a>;
    type SerializeTupleStruct = Items<'a>;
    type SerializeTupleVariant = Items<'a>;
    type SerializeMap = Items<'a>;
    type SerializeStruct = Items<'a>;
    type SerializeStructVariant = Items<'a>;

    integers! {
        serialize_u8(u8) serialize_u16(u16) serialize_u32(u32) serialize_u64(u64)
        serialize_i8(i8) serialize_i16(i16) serialize_i32(i32) serialize_i64(i64)
    }
    rarities! { serialize_f32(f32) serialize_f64(f64) serialize_char(char) serialize_bytes(&[u8]) }

    fn serialize_bool(self, yes: bool) -> Result<(), Error> {
        self.0.extend_from_slice(if yes { b"true" } else { b"false" });
        Ok(())
    }

    fn serialize_str(self, text: &str) -> Result<(), Error> {
        if !is_plain(text.as_bytes()) {
            return serde_json::to_writer(self.0, text);
        }
        self.0.reserve(text.len() + 2);
        self.0.push(b'"');
        self.0.extend_from_slice(text.as_bytes());
        self.0.push(b'"');
        Ok(())
    }

    fn serialize_none(self) -> Result<(), Error> {
        self.serialize_unit()
    }

    fn serialize_some<T: Serialize + ?Sized>(self, value: &T) -> Result<(), Error> {
        value.serialize(self)
    }

    fn serialize_unit(self) -> Result<(), Error> {
        self.0.extend_from_slice(b"null");
        Ok(())
    }

    fn serialize_unit_struct(self, _: &'static str) -> Result<(), Error> {
        self.serialize_unit()
    }

    fn serialize_unit_variant(self, _: &'static str, _: u32, variant: &'static str) -> Result<(), Error> {
        self.serialize_str(variant)
    }

    fn serialize_newtype_struct<T: Serialize + ?Sized>(self, _: &'static str, value: &T) -> Result<(), Error> {
        value.serialize(self)
    }

    fn serialize_newtype_variant<T: Serialize + ?Sized>(
        self,
        _: &'static str,
        _: u32,
        variant: &'static str,
        value: &T,
    ) -> Result<(), Error> {
        let items = self.variant(variant, b"", b"}");
        write(value, items.out)?;
        items.close()
    }

    fn serialize_seq(self, _: Option<usize>) -> Result<Items<'a>, Error> {
        Ok(self.open(b"[", b"]"))
    }

    fn serialize_tuple(self, _: usize) -> Result<Items<'a>, Error> {
        Ok(self.open(b"[", b"]"))
    }

    fn serialize_tuple_struct(self, _: &'static str, _: usize) -> Result<Items<'a>, Error> {
        Ok(self.open(b"[", b"]"))
    }

    fn serialize_tuple_variant(
        self,
        _: &'static str,
        _: u32,
        variant: &'static str,
        _: usize,
    ) -> Result<Items<'a>, Error> {
        Ok(self.variant(variant, b"[", b"]}"))
    }

    fn serialize_map(self, _: Option<usize>) -> Result<Items<'a>, Error> {
        Ok(self.open(b"{", b"}"))
    }

    fn serialize_struct(self, _: &'static str, _: usize) -> Result<Items<'a>, Error> {
        Ok(self.open(b"{", b"}"))
    }

    fn serialize_struct_variant(
        self,
        _: &'static str,
        _: u32,
        variant: &'static str,
        _: usize,
    ) -> Result<Items<'a>, Error> {
        Ok(self.variant(variant, b"{", b"}}"))
    }
}

macro_rules! arrays {
    ($($array:ident::$method:ident)*) => {
        $(impl $array for Items<'_> {
            type Ok = ();
            type Error = Error;

            fn $method<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), Error> {
                self.item(value)
            }

            fn end(self) -> Result<(), Error> {
                self.close()
            }
        })*
    };
}

arrays! {
    SerializeSeq::serialize_element SerializeTuple::serialize_element
    SerializeTupleStruct::serialize_field SerializeTupleVariant::serialize_field
}

macro_rules! objects {
    ($($object:ident)*) => {
        $(impl $object for Items<'_> {
            type Ok = ();
            type Error = Error;

            #[inline(always)]
            fn serialize_field<T: Serialize + ?Sized>(&mut self, field: &'static str, value: &T) -> Result<(), Error> {
                self.field(field, value)
            }

            fn end(self) -> Result<(), Error> {
                self.close()
            }
        })*
    };
}

objects! { SerializeStruct SerializeStructVariant }

impl SerializeMap for Items<'_> {
    type Ok = ();
    type Error = Error;

    fn serialize_key<T: Serialize + ?Sized>(&mut self, key: &T) -> Result<(), Error> {
        self.next();
        let start = self.out.len();
        write(key, self.out)?;
        match self.out.get(start) {
            Some(b'"') => Ok(()),
            _ => Err(Error::custom("a key of a map is no text")),
        }
    }

    fn serialize_value<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), Error> {
        self.out.push(b':');
        write(value, self.out)
    }

    fn end(self) -> Result<(), Error> {
        self.close()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;
    use serde::Serialize;

    use super::*;

    fn written<T: Serialize>(value: &T) -> String {
        let mut out = Vec::new();
        write(value, &mut out).expect("the value can be written");
        String::from_utf8(out).expect("JSON is text")
    }

    #[derive(Debug, Serialize)]
    enum Shape {
        Unit,
        New(Option<i8>),
        Tuple(u8, String),
        Struct {
            #[serde(rename = "type")]
            kind: char,
            #[serde(skip_serializing_if = "Option::is_none")]
            left_out: Option<u8>,
            also: Vec<bool>,
        },
    }

    #[derive(Debug, Serialize)]
    #[serde(tag = "tag")]
    enum Tagged {
        Some { text: String, fraction: f64 },
    }

    #[derive(Debug, Serialize)]
    struct All {
        shapes: Vec<Shape>,
        tagged: Tagged,
        numbers: (u64, i64, u16, u32, i16, i32, f32),
        unit: (),
        #[serde(flatten)]
        more: BTreeMap<String, Vec<Shape>>,
    }

    prop_compose! {
        fn all()(text in ".*", key in ".*", n in any::<u64>(), i in any::<i64>(), f in any::<f64>(), kind in any::<char>()) -> All {
            let shapes = || vec![
                Shape::Unit,
                Shape::New(None),
                Shape::New(Some(i as i8)),
                Shape::Tuple(n as u8, text.clone()),
                Shape::Struct { kind, left_out: None, also: vec![] },
                Shape::Struct { kind, left_out: Some(0), also: vec![true, false] },
            ];
            All {
                shapes: shapes(),
                tagged: Tagged::Some { text: text.clone(), fraction: f },
                numbers: (n, i, n as u16, n as u32, i as i16, i as i32, f as f32),
                unit: (),
                more: BTreeMap::from([(key, shapes()), (String::new(), vec![])]),
            }
        }
    }

    proptest! {
        #[test]
        fn every_shape_is_written_as_serde_json_writes_it(all in all()) {
            prop_assert_eq!(written(&all), serde_json::to_string(&all).expect("the value can be written"));
        }

        #[test]
        fn a_text_is_plain_where_serde_json_escapes_nothing(text in r#"([\x00-\x7f]|["\\]|é|\u{2028}|[a-z]{1,9}){0,20}"#) {
            let json = serde_json::to_string(&text).expect("a text can be written");
            prop_assert_eq!(is_plain(text.as_bytes()), json.len() == text.len() + 2);
            prop_assert_eq!(written(&text), json);
        }
    }

    /// In every place of a word, with neighbours that borrow from it.
    #[test]
    fn every_byte_of_a_word_is_looked_at() {
        for place in 0..8 {
            for byte in 0..=u8::MAX {
                for other in [b'a', 0x7f, 0x80, 0xff, b' ', b'!', b'#', b'[', b']'] {
                    let mut word = [other; 8];
                    word[place] = byte;
                    let escaped = byte < 0x20 || byte == b'"' || byte == b'\\';
                    assert_eq!(is_plain(&word), !escaped, "{word:?}");
                }
            }
        }
    }

    #[test]
    fn a_key_that_is_no_text_is_refused() {
        let refused = write(&BTreeMap::from([(1, 2)]), &mut Vec::new()).expect_err("a number is no key here");
        assert_eq!(refused.to_string(), "a key of a map is no text");
    }
}
