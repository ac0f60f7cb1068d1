//! Embeddings: vectors that follow from the text, as numbers or in base64.

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::prompt::tokens;

const DIMENSIONS: u64 = 8;
const DIMENSIONS_MAX: u64 = 4096;
const BASE64: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

/// Answers a request; the second value is the number of tokens.
pub(crate) fn object(request: &Value) -> (Value, u64) {
    let inputs: Vec<String> = match &request["input"] {
        Value::Array(inputs) if inputs.iter().all(Value::is_number) => vec![request["input"].to_string()],
        Value::Array(inputs) => {
            inputs.iter().map(|input| input.as_str().map_or_else(|| input.to_string(), str::to_owned)).collect()
        }
        input => vec![input.as_str().unwrap_or_default().to_owned()],
    };
    let dimensions = request["dimensions"].as_u64().unwrap_or(DIMENSIONS).min(DIMENSIONS_MAX);
    let encoded = |input: &String| {
        let vector = vector(input, dimensions);
        if request["encoding_format"] == "base64" {
            json!(base64(&vector.iter().flat_map(|number| number.to_le_bytes()).collect::<Vec<_>>()))
        } else {
            json!(vector)
        }
    };
    let entry = |(index, input)| json!({"object": "embedding", "index": index, "embedding": encoded(input)});
    let data: Vec<Value> = inputs.iter().enumerate().map(entry).collect();
    let tokens = inputs.iter().map(|input| tokens(input)).sum();
    let usage = json!({"prompt_tokens": tokens, "total_tokens": tokens});
    (json!({"object": "list", "data": data, "model": request["model"], "usage": usage}), tokens)
}

/// Multiples of 1/128 between -1 and 1, exact in any float format.
fn vector(text: &str, dimensions: u64) -> Vec<f32> {
    let digest = Sha256::digest(text.as_bytes());
    (0..dimensions as usize).map(|n| (f32::from(digest[n % digest.len()]) - 128.0) / 128.0).collect()
}

fn base64(bytes: &[u8]) -> String {
    let group = |three: &[u8]| {
        let bits = (0..3).fold(0_usize, |bits, n| bits << 8 | usize::from(three.get(n).copied().unwrap_or(0)));
        let digit = |n: usize| if n <= three.len() { BASE64[bits >> (18 - 6 * n) & 63] } else { b'=' };
        (0..4).map(|n| char::from(digit(n))).collect::<String>()
    };
    bytes.chunks(3).map(group).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_is_that_of_rfc_4648() {
        let table =
            [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foob", "Zm9vYg=="), ("foobar", "Zm9vYmFy")];
        for (plain, encoded) in table {
            assert_eq!(base64(plain.as_bytes()), encoded);
        }
    }

    #[test]
    fn each_input_has_a_vector_of_its_own() {
        let (object, tokens) = object(&json!({"model": "e", "input": ["abc", "defgh"], "dimensions": 4}));
        assert_eq!(tokens, 1 + 2);
        assert_eq!(object["usage"], json!({"prompt_tokens": 3, "total_tokens": 3}));
        // SHA-256("abc") begins ba 78 16 bf: (186-128)/128, (120-128)/128, (22-128)/128, (191-128)/128
        assert_eq!(object["data"][0]["embedding"], json!([0.453125, -0.0625, -0.828125, 0.4921875]));
        assert_eq!((&object["data"][1]["index"], &object["data"][1]["object"]), (&json!(1), &json!("embedding")));
    }
}
