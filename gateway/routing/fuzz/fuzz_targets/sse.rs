//! The SSE decoder under the fuzzer.

#![no_main]

#[path = "../decoder.rs"]
mod decoder;

libfuzzer_sys::fuzz_target!(|input: &[u8]| decoder::check(input));
