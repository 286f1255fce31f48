//! `--health-*`: how the health of a container is checked; what is not said is the image's.

use std::time::Duration;

use anyhow::Context as _;
use clap::Args;
use oci_spec::runtime::Process;
use serde::Deserialize;

use crate::sandbox::{HealthCheck, further_process};

/// As in docker, where neither flags nor the image say otherwise.
const INTERVAL: Duration = Duration::from_secs(30);
const START_INTERVAL: Duration = Duration::from_secs(5);
const RETRIES: u32 = 3;

/// Shorter durations are refused, as in docker.
const SHORTEST: Duration = Duration::from_millis(1);

#[derive(Debug, Args)]
pub(in crate::cli) struct HealthArgs {
    /// Check the health of the program by this command, which its shell runs [default: the image's]
    #[arg(long, value_name = "CMD", conflicts_with = "no_healthcheck")]
    health_cmd: Option<String>,

    /// Time between two checks, such as 1m30s [default: the image's, or 30s]
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    health_interval: Option<Duration>,

    /// Time after which a check has failed [default: the image's, or 30s]
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    health_timeout: Option<Duration>,

    /// Failures in a row that make the container unhealthy [default: the image's, or 3]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    health_retries: Option<u32>,

    /// Time after the start in which failures do not count [default: the image's, or 0s]
    #[arg(long, value_name = "DURATION", value_parser = parse_period)]
    health_start_period: Option<Duration>,

    /// Time between two checks in that time [default: the image's, or 5s]
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    health_start_interval: Option<Duration>,

    /// Do not check the health, whatever the image says
    #[arg(long)]
    no_healthcheck: bool,
}

fn parse_period(text: &str) -> Result<Duration, String> {
    humantime::parse_duration(text).map_err(|_| "write a duration such as 1m30s or 500ms".into())
}

fn parse_duration(text: &str) -> Result<Duration, String> {
    match parse_period(text)? {
        duration if duration < SHORTEST => Err("the shortest duration is 1ms".to_owned()),
        duration => Ok(duration),
    }
}

/// The parts of an image's configuration that the OCI specification does not have.
#[derive(Debug, Default, Deserialize)]
struct ImageConfig {
    #[serde(default)]
    config: Option<ContainerConfig>,
}

#[derive(Debug, Default, Deserialize)]
struct ContainerConfig {
    #[serde(rename = "Healthcheck")]
    health: Option<ImageCheck>,
}

/// `HEALTHCHECK` of a Dockerfile; durations are in nanoseconds, and 0 is none.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
struct ImageCheck {
    test: Option<Vec<String>>,
    interval: Option<u64>,
    timeout: Option<u64>,
    start_period: Option<u64>,
    start_interval: Option<u64>,
    retries: Option<u32>,
}

impl HealthArgs {
    /// Returns how a container's health is checked, whose program is `process` and whose image has
    /// the configuration `image`; `None` if it is not.
    ///
    /// # Errors
    /// The configuration cannot be read, or its check is none.
    pub(super) fn check(
        &self,
        image: &[u8],
        process: &Process,
        user: &str,
    ) -> anyhow::Result<Option<HealthCheck>> {
        if self.no_healthcheck {
            return Ok(None);
        }
        let image: ImageConfig =
            serde_json::from_slice(image).context("cannot read the image's HEALTHCHECK")?;
        let image = image.config.and_then(|config| config.health);
        let image = image.unwrap_or_default();
        let command = match &self.health_cmd {
            Some(command) => shell(command),
            None => match of_image(image.test.as_deref().unwrap_or_default())? {
                Some(command) => command,
                None => return Ok(None),
            },
        };
        let or = |flag: Option<Duration>, of_image: Option<u64>, usual: Duration| {
            let of_image = of_image.map(Duration::from_nanos);
            let of_image = of_image.filter(|duration| *duration >= SHORTEST);
            flag.or(of_image).unwrap_or(usual)
        };
        let of_image = image.retries.filter(|retries| *retries > 0);
        Ok(Some(HealthCheck {
            process: further_process(process, command, false),
            user: user.to_owned(),
            interval: or(self.health_interval, image.interval, INTERVAL),
            timeout: or(self.health_timeout, image.timeout, INTERVAL),
            start_period: or(self.health_start_period, image.start_period, Duration::ZERO),
            start_interval: or(
                self.health_start_interval,
                image.start_interval,
                START_INTERVAL,
            ),
            retries: self.health_retries.or(of_image).unwrap_or(RETRIES),
        }))
    }
}

fn shell(command: &str) -> Vec<String> {
    ["/bin/sh", "-c", command].map(str::to_owned).to_vec()
}

/// Returns the command of an image's check; `None` if it has none.
fn of_image(test: &[String]) -> anyhow::Result<Option<Vec<String>>> {
    match test {
        [] => Ok(None),
        [none] if none == "NONE" => Ok(None),
        [kind, command] if kind == "CMD-SHELL" => Ok(Some(shell(command))),
        [kind, command @ ..] if kind == "CMD" && !command.is_empty() => Ok(Some(command.to_vec())),
        [kind, ..] => {
            let kind: String = kind.chars().take(64).collect();
            anyhow::bail!(
                "the image's HEALTHCHECK begins with {kind:?}, which is unknown: give another \
                 check by --health-cmd, or --no-healthcheck"
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;
    use serde_json::json;

    use super::*;

    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        health: HealthArgs,
    }

    fn check(flags: &[&str], image: &serde_json::Value) -> anyhow::Result<Option<HealthCheck>> {
        let line = ["run"].iter().chain(flags);
        let args = Line::try_parse_from(line)?.health;
        let config = json!({ "config": { "Healthcheck": image } });
        args.check(config.to_string().as_bytes(), &Process::default(), "u:g")
    }

    #[test]
    fn flags_go_before_the_image_and_the_image_before_dockers_defaults() {
        let none = json!(null);
        assert_eq!(check(&[], &none).unwrap(), None);
        assert_eq!(check(&["--health-interval", "1s"], &none).unwrap(), None);
        let usual = check(&["--health-cmd", "true"], &none).unwrap().unwrap();
        let command = |check: &HealthCheck| check.process.args().clone().unwrap();
        assert_eq!(command(&usual), ["/bin/sh", "-c", "true"]);
        assert_eq!((usual.user.as_str(), usual.retries), ("u:g", RETRIES));
        assert_eq!((usual.interval, usual.timeout), (INTERVAL, INTERVAL));
        assert_eq!(usual.start_period, Duration::ZERO);
        let image = json!({
            "Test": ["CMD", "curl", "-f", "localhost"], "Interval": 2_000_000_000_u64, "Timeout": 0,
            "StartPeriod": 1_000_000_u64, "Retries": 7,
        });
        let flags = ["--health-retries", "2", "--health-timeout", "1m1s"];
        let both = check(&flags, &image).unwrap().unwrap();
        assert_eq!(command(&both), ["curl", "-f", "localhost"]);
        assert_eq!((both.interval, both.retries), (Duration::from_secs(2), 2));
        assert_eq!(both.timeout, Duration::from_secs(61));
        assert_eq!(both.start_period, SHORTEST);
        let other = check(&["--health-cmd", "x"], &image).unwrap().unwrap();
        assert_eq!(command(&other), ["/bin/sh", "-c", "x"]);
        assert_eq!(other.retries, 7);
    }

    #[test]
    fn an_image_without_a_check_and_a_flag_against_it_have_none() {
        for test in [json!([]), json!(["NONE"]), json!(null)] {
            assert_eq!(check(&[], &json!({ "Test": test })).unwrap(), None);
        }
        let image = json!({ "Test": ["CMD-SHELL", "exit 1"] });
        assert!(check(&[], &image).unwrap().is_some());
        assert_eq!(check(&["--no-healthcheck"], &image).unwrap(), None);
        let odd = check(&[], &json!({ "Test": ["PING"] })).unwrap_err();
        assert!(odd.to_string().contains("--no-healthcheck"), "{odd}");
        for bad in [
            ["--health-interval", "0s"],
            ["--health-timeout", "fast"],
            ["--health-retries", "0"],
        ] {
            assert!(
                Line::try_parse_from(["run", bad[0], bad[1]]).is_err(),
                "{bad:?}"
            );
        }
    }
}
