//! Gates: what a measured value must not miss, and the lines that say whether it does.

use std::fmt;

/// A measured value and its limit.
#[derive(Clone, Debug)]
pub(crate) struct Gate {
    name: &'static str,
    measured: f64,
    limit: Limit,
}

/// What the value may be.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Limit {
    /// This or more.
    AtLeast(f64),
    /// This or less.
    AtMost(f64),
}

impl Gate {
    /// A gate for `measured`.
    pub(crate) fn new(name: &'static str, measured: f64, limit: Limit) -> Self {
        Self { name, measured, limit }
    }

    /// Whether the value is within the limit; one that is no number is not.
    pub(crate) fn holds(&self) -> bool {
        match self.limit {
            Limit::AtLeast(limit) => self.measured >= limit,
            Limit::AtMost(limit) => self.measured <= limit,
        }
    }
}

impl fmt::Display for Gate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = if self.holds() { "PASS" } else { "FAIL" };
        let (sign, limit) = match self.limit {
            Limit::AtLeast(limit) => (">=", limit),
            Limit::AtMost(limit) => ("<=", limit),
        };
        write!(f, "{word} {} {:.3} ({sign} {limit})", self.name, self.measured)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_on_the_limit_passes_and_no_number_fails() {
        let check = |measured, limit, line: &str| assert_eq!(Gate::new("x", measured, limit).to_string(), line);
        check(3.0, Limit::AtMost(3.0), "PASS x 3.000 (<= 3)");
        check(3.1, Limit::AtMost(3.0), "FAIL x 3.100 (<= 3)");
        check(0.99, Limit::AtLeast(0.99), "PASS x 0.990 (>= 0.99)");
        check(f64::NAN, Limit::AtMost(3.0), "FAIL x NaN (<= 3)");
    }
}
