//! Counting what libtest prints: `test NAME ... ok` per test, `test result: …` per program.

use std::fmt;

use anyhow::{Result, bail};

/// How many tests ran, and which failed.
#[derive(Debug, Default, Clone)]
pub(crate) struct Count {
    pub(crate) passed: usize,
    pub(crate) failed: usize,
    pub(crate) failures: Vec<String>,
}

impl Count {
    /// Takes one line of output into account.
    pub(crate) fn line(&mut self, line: &str) {
        if let Some(name) = line
            .strip_prefix("test ")
            .and_then(|rest| rest.trim_end().strip_suffix(" ... FAILED"))
        {
            self.failures.push(name.to_owned());
        }
        let Some(result) = line.strip_prefix("test result: ") else {
            return;
        };
        let number = |what: &str| {
            result
                .split([';', '.'])
                .find_map(|part| part.trim().strip_suffix(what))
                .and_then(|number| number.trim().parse::<usize>().ok())
                .unwrap_or(0)
        };
        self.passed += number(" passed");
        self.failed += number(" failed");
    }

    /// Closes the count of a program that ended: tests that it never came to have failed.
    pub(crate) fn settle(&mut self, name: &str, expected: usize, success: bool, status: &str) {
        let seen = self.passed + self.failed;
        if seen < expected {
            self.failed += expected - seen;
            self.failures.push(format!(
                "{name}: {} tests did not come to an end ({status})",
                expected - seen
            ));
        } else if !success && self.failed == 0 {
            self.failed += 1;
            self.failures.push(format!("{name} ({status})"));
        }
    }

    pub(crate) fn add(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.failures.extend(other.failures);
    }

    pub(crate) fn plus(&self, other: &Self) -> Self {
        let mut sum = self.clone();
        sum.add(other.clone());
        sum
    }

    /// An error when a test failed.
    pub(crate) fn check(&self) -> Result<()> {
        if self.failed > 0 {
            bail!("{} of the tests failed", self.failed);
        }
        Ok(())
    }
}

impl fmt::Display for Count {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} passed, {} failed", self.passed, self.failed)
    }
}

#[cfg(test)]
mod tests {
    use super::Count;

    #[test]
    fn results_of_several_programs_add_up() {
        let mut count = Count::default();
        for line in [
            "test a::b ... ok",
            "test c ... FAILED",
            "test result: FAILED. 7 passed; 1 failed; 0 ignored; 0 measured; 2 filtered out; finished in 0.03s",
            "test result: ok. 12 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.03s",
        ] {
            count.line(line);
        }
        assert_eq!(count.to_string(), "19 passed, 1 failed");
        assert_eq!(count.failures, ["c"]);
        assert!(count.check().is_err());
    }

    #[test]
    fn tests_that_never_ended_have_failed() {
        let mut count = Count::default();
        count.line("test result: ok. 2 passed; 0 failed; 0 ignored");
        count.settle("x", 5, false, "exit status: 101");
        assert_eq!(count.to_string(), "2 passed, 3 failed");
    }

    #[test]
    fn a_failing_program_without_a_failing_test_counts_once() {
        let mut count = Count::default();
        count.line("test result: ok. 2 passed; 0 failed; 0 ignored");
        count.settle("x", 2, false, "exit status: 1");
        assert_eq!(count.to_string(), "2 passed, 1 failed");
    }
}
