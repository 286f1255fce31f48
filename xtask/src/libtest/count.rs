//! Counts libtest's results: `test NAME ... ok` per test, `test result: …` per program.

use std::fmt;
use std::time::Duration;

use anyhow::{Result, bail};

/// Numbers of tests that passed and failed, and their names.
#[derive(Debug, Default, Clone)]
pub(crate) struct Count {
    pub(crate) passed: usize,
    pub(crate) failed: usize,
    pub(crate) failures: Vec<String>,
    /// Tests that failed and passed on the second run.
    pub(crate) unsteady: Vec<String>,
    /// The tests with their durations.
    times: Vec<(Duration, String)>,
}

impl Count {
    /// Processes a line of output that arrived `time` after the last test's end; returns whether it
    /// is the end of a test.
    pub(crate) fn line(&mut self, line: &str, time: Duration) -> bool {
        if let Some((name, end)) = line
            .strip_prefix("test ")
            .and_then(|rest| rest.trim_end().split_once(" ... "))
        {
            if end == "FAILED" {
                self.failures.push(name.to_owned());
            }
            self.times.push((time, name.to_owned()));
            return true;
        }
        let Some(result) = line.strip_prefix("test result: ") else {
            return false;
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
        false
    }

    /// Returns the slowest tests, with their durations.
    pub(crate) fn slowest(&self, number: usize) -> Vec<(Duration, &str)> {
        let mut times: Vec<_> = self
            .times
            .iter()
            .map(|(time, name)| (*time, name.as_str()))
            .collect();
        times.sort_by_key(|(time, _)| std::cmp::Reverse(*time));
        times.truncate(number);
        times
    }

    /// Completes the count of a program that exited: tests that it did not reach count as failed.
    pub(crate) fn complete(&mut self, name: &str, expected: usize, success: bool, status: &str) {
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

    /// Adds the result of the second run of a failed test.
    pub(crate) fn again(&mut self, test: &str, second: Self) {
        if second.passed == 1 && second.failed == 0 {
            self.failures.retain(|failed| failed != test);
            self.unsteady.push(test.to_owned());
            self.failed -= 1;
            self.passed += 1;
        }
        self.times.extend(second.times);
    }

    pub(crate) fn add(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.failures.extend(other.failures);
        self.unsteady.extend(other.unsteady);
        self.times.extend(other.times);
    }

    pub(crate) fn plus(&self, other: &Self) -> Self {
        let mut sum = self.clone();
        sum.add(other.clone());
        sum
    }

    /// Returns an error if a test failed.
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
    use super::*;

    #[test]
    fn results_of_several_programs_add_up() {
        let mut count = Count::default();
        for line in [
            "test a::b ... ok",
            "test c ... FAILED",
            "test result: FAILED. 7 passed; 1 failed; 0 ignored; 0 measured; 2 filtered out; finished in 0.03s",
            "test result: ok. 12 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.03s",
        ] {
            count.line(line, Duration::ZERO);
        }
        assert_eq!(count.to_string(), "19 passed, 1 failed");
        assert_eq!(count.failures, ["c"]);
        assert!(count.check().is_err());
    }

    #[test]
    fn tests_that_never_ended_have_failed() {
        let mut count = Count::default();
        count.line(
            "test result: ok. 2 passed; 0 failed; 0 ignored",
            Duration::ZERO,
        );
        count.complete("x", 5, false, "exit status: 101");
        assert_eq!(count.to_string(), "2 passed, 3 failed");
    }

    #[test]
    fn a_failing_program_without_a_failing_test_counts_once() {
        let mut count = Count::default();
        count.line(
            "test result: ok. 2 passed; 0 failed; 0 ignored",
            Duration::ZERO,
        );
        count.complete("x", 2, false, "exit status: 1");
        assert_eq!(count.to_string(), "2 passed, 1 failed");
    }

    #[test]
    fn only_a_test_that_passes_the_second_time_is_unsteady() {
        let result = |text: &str| {
            let mut count = Count::default();
            count.line(text, Duration::ZERO);
            count
        };
        let mut count = result("test result: FAILED. 7 passed; 2 failed; 0 ignored");
        count.failures = vec!["a".to_owned(), "b".to_owned()];
        count.again("a", result("test result: ok. 1 passed; 0 failed"));
        count.again("b", result("test result: FAILED. 0 passed; 1 failed"));
        // Its program did not reach it.
        count.again("b", Count::default());
        assert_eq!(count.to_string(), "8 passed, 1 failed");
        assert_eq!(
            (count.failures, count.unsteady),
            (vec!["b".to_owned()], vec!["a".to_owned()])
        );
    }

    #[test]
    fn the_slowest_tests_come_first() {
        let mut count = Count::default();
        for (line, seconds) in [
            ("running 3 tests", 9),
            ("test a ... ok", 1),
            ("test b ... FAILED", 3),
            ("test c ... ok", 2),
        ] {
            count.line(line, Duration::from_secs(seconds));
        }
        let names: Vec<_> = count.slowest(2).iter().map(|(_, name)| *name).collect();
        assert_eq!(names, ["b", "c"]);
    }
}
