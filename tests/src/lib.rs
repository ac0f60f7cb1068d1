//! Worlds: tests of the whole, in `e2e/` and `tidy/`. The crate itself is empty.
