//! What the loader is told: by arguments after ` -- ` on its kernel's command line, or by
//! parameters before it.
//!
//! | argument | parameter | meaning |
//! | --- | --- | --- |
//! | `--root SERIAL` | `podvisor.root=SERIAL` | only this disk is looked at; may be repeated |
//! | `--append "WORDS"` | | parameters for the next kernel, after those of the entry |
//! | `--no-self-tests` | | the next kernel tests no cryptography, unless its entry says so |
//! | `--hand-over SERIAL` | | what would be started is written to the disk with this serial |
//! | `--timeout SECONDS` | `podvisor.timeout=SECONDS` | how long one step may take (60) |

use std::time::Duration;

use podvisor_boot_entries::cmdline::parameters;

use crate::error::LoaderError;

/// The arguments.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Args {
    /// Serials of the disks to look at; all if there are none.
    pub(crate) roots: Vec<String>,
    /// Parameters for the next kernel.
    pub(crate) append: Vec<String>,
    /// The next kernel is told not to test its cryptography.
    pub(crate) no_self_tests: bool,
    /// The serial of the disk that what would be started is written to, instead of starting it.
    pub(crate) hand_over: Option<String>,
    /// How long one step may take.
    pub(crate) timeout: Duration,
}

impl Args {
    /// Parses the arguments, and the kernel's command line.
    ///
    /// The kernel hands words of its own command line over that it does not know: only what begins
    /// with `--` is an argument.
    pub(crate) fn parse(
        arguments: impl Iterator<Item = String>,
        own: &str,
    ) -> Result<Self, LoaderError> {
        let mut args = Self {
            roots: Vec::new(),
            append: Vec::new(),
            no_self_tests: false,
            hand_over: None,
            timeout: Duration::from_secs(60),
        };
        for parameter in parameters(own).take_while(|parameter| *parameter != "--") {
            if let Some(serial) = parameter.strip_prefix("podvisor.root=") {
                args.roots.push(serial.to_owned());
            } else if let Some(seconds) = parameter.strip_prefix("podvisor.timeout=") {
                args.timeout = timeout(seconds)?;
            }
        }
        let mut arguments = arguments;
        while let Some(argument) = arguments.next() {
            let (name, value) = match argument.split_once('=') {
                Some((name, value)) => (name.to_owned(), Some(value.to_owned())),
                None => (argument, None),
            };
            if !name.starts_with("--") || name == "--" {
                continue;
            }
            if name == "--no-self-tests" {
                args.no_self_tests = true;
                continue;
            }
            let value = value.or_else(|| arguments.next());
            let Some(value) = value else {
                return Err(LoaderError::Argument(format!("{name} has no value")));
            };
            match name.as_str() {
                "--root" => args.roots.push(value),
                "--append" => args.append.extend(parameters(&value).map(str::to_owned)),
                "--hand-over" => args.hand_over = Some(value),
                "--timeout" => args.timeout = timeout(&value)?,
                name => return Err(LoaderError::Argument(format!("{name} is unknown"))),
            }
        }
        Ok(args)
    }
}

fn timeout(seconds: &str) -> Result<Duration, LoaderError> {
    match seconds.parse() {
        Ok(seconds @ 1..=86_400) => Ok(Duration::from_secs(seconds)),
        _ => Err(LoaderError::Argument(format!(
            "the timeout {seconds:?} is no number of seconds from 1 to 86400"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(arguments: &[&str], own: &str) -> Result<Args, LoaderError> {
        Args::parse(arguments.iter().map(|word| (*word).to_owned()), own)
    }

    #[test]
    fn arguments_and_parameters_are_the_same() {
        let expected = Args {
            roots: vec!["root".to_owned()],
            append: vec!["a=1".to_owned(), "b".to_owned()],
            no_self_tests: true,
            hand_over: Some("kept".to_owned()),
            timeout: Duration::from_secs(5),
        };
        let by_words = parse(
            &[
                "stray",
                "--root",
                "root",
                "--append",
                "a=1 b",
                "--no-self-tests",
                "--hand-over",
                "kept",
                "--timeout=5",
            ],
            "quiet stray -- --root root",
        );
        assert_eq!(by_words.unwrap(), expected);
        let by_line = parse(
            &["--append=a=1 b", "--no-self-tests", "--hand-over=kept"],
            "podvisor.root=root podvisor.timeout=5 -- x",
        );
        assert_eq!(by_line.unwrap(), expected);
    }

    #[test]
    fn what_is_no_argument_is_refused() {
        for (words, part) in [
            (&["--root"][..], "--root has no value"),
            (&["--frobnicate", "x"], "--frobnicate is unknown"),
            (&["--timeout", "0"], "no number of seconds"),
        ] {
            let error = parse(words, "").unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
    }
}
