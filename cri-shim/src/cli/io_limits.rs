//! Limits of a machine's I/O on block devices of the host: docker's flags, their errors, and
//! docker's names of them in `inspect`.

use std::path::PathBuf;

use clap::Args;
use serde_json::{Value, json};

use super::size;
use crate::sandbox::{IoLimit, IoLimitError, SandboxError, merge_io_limits};

#[derive(Debug, Clone, Default, Args)]
pub(in crate::cli) struct IoArgs {
    /// Read at most so many bytes a second from a disk of the host: /dev/sda:10mb
    #[arg(long, value_name = "PATH:RATE", value_parser = parse_bytes)]
    device_read_bps: Vec<DeviceRate>,

    /// Write at most so many bytes a second to a disk of the host
    #[arg(long, value_name = "PATH:RATE", value_parser = parse_bytes)]
    device_write_bps: Vec<DeviceRate>,

    /// Read at most so many times a second from a disk of the host: /dev/sda:1000
    #[arg(long, value_name = "PATH:RATE", value_parser = parse_operations)]
    device_read_iops: Vec<DeviceRate>,

    /// Write at most so many times a second to a disk of the host
    #[arg(long, value_name = "PATH:RATE", value_parser = parse_operations)]
    device_write_iops: Vec<DeviceRate>,
}

/// A device, and how much a second.
#[derive(Debug, Clone, PartialEq, Eq)]
struct DeviceRate {
    device: PathBuf,
    rate: u64,
}

fn parse_bytes(text: &str) -> Result<DeviceRate, String> {
    parse(text, "/dev/sda:10mb", |rate| {
        size::parse(rate).map_err(|error| error.to_string())
    })
}

fn parse_operations(text: &str) -> Result<DeviceRate, String> {
    parse(text, "/dev/sda:1000", |rate| {
        let parsed = rate.parse();
        parsed.map_err(|_| format!("`{rate}` is no number of operations a second"))
    })
}

/// Parses `PATH:RATE`. A path may have colons, as those in /dev/disk/by-path.
fn parse(
    text: &str,
    example: &str,
    rate: impl Fn(&str) -> Result<u64, String>,
) -> Result<DeviceRate, String> {
    let usage = || format!("write PATH:RATE with a disk of this host, such as {example}");
    let (device, number) = text.rsplit_once(':').ok_or_else(usage)?;
    if !device.starts_with('/') {
        return Err(usage());
    }
    match rate(number)? {
        0 => Err("the kernel takes no limit of 0; leave the flag out for no limit".to_owned()),
        rate => Ok(DeviceRate {
            device: device.into(),
            rate,
        }),
    }
}

/// The limit of a device that a flag sets.
type Field = fn(&mut IoLimit) -> &mut Option<u64>;

impl IoArgs {
    /// Returns the limits of each device; they are there.
    pub(in crate::cli) fn limits(&self) -> anyhow::Result<Vec<IoLimit>> {
        Ok(merge_io_limits(&self.flags())?)
    }

    /// Returns the limit that each flag sets.
    fn flags(&self) -> Vec<IoLimit> {
        let flags: [(&[DeviceRate], Field); 4] = [
            (&self.device_read_bps, |limit| &mut limit.read_bps),
            (&self.device_write_bps, |limit| &mut limit.write_bps),
            (&self.device_read_iops, |limit| &mut limit.read_iops),
            (&self.device_write_iops, |limit| &mut limit.write_iops),
        ];
        let limit = |field: Field, DeviceRate { device, rate }: &DeviceRate| {
            let mut limit = IoLimit {
                device: device.clone(),
                ..IoLimit::default()
            };
            *field(&mut limit) = Some(*rate);
            limit
        };
        let limits = flags
            .into_iter()
            .flat_map(|(rates, field)| rates.iter().map(move |rate| limit(field, rate)));
        limits.collect()
    }
}

/// Returns a limit of a device.
type Limit = fn(&IoLimit) -> Option<u64>;

/// Adds the limits to a description, with docker's names.
pub(in crate::cli) fn add_to_view(view: &mut Value, limits: &[IoLimit]) {
    let fields: [(&str, Limit); 4] = [
        ("BlkioDeviceReadBps", |limit| limit.read_bps),
        ("BlkioDeviceWriteBps", |limit| limit.write_bps),
        ("BlkioDeviceReadIOps", |limit| limit.read_iops),
        ("BlkioDeviceWriteIOps", |limit| limit.write_iops),
    ];
    for (name, rate) in fields {
        let of_device = |limit: &IoLimit| {
            let rate = rate(limit)?;
            Some(json!({"Path": limit.device, "Rate": rate}))
        };
        view[name] = limits.iter().filter_map(of_device).collect();
    }
}

/// Adds advice to the error of a machine that could not be started, if it is one of its limits.
pub(in crate::cli) fn advised(error: anyhow::Error) -> anyhow::Error {
    match error.downcast_ref() {
        Some(SandboxError::IoLimit(IoLimitError::Group(_) | IoLimitError::NoGroup)) => {
            // The whole chain first: a context would be printed before it.
            let said = super::message(&error);
            anyhow::Error::msg(format!(
                "{said}; limits of I/O take {}; without --device-read-bps and its like it runs \
                 without them",
                needed(rustix::process::geteuid().is_root())
            ))
        }
        _ => error,
    }
}

fn needed(is_root: bool) -> &'static str {
    match is_root {
        true => {
            "the controller io of cgroup v2: /sys/fs/cgroup/cgroup.controllers lists it if the \
             kernel has it and no cgroup v1 uses it, and `echo +io \
             >/sys/fs/cgroup/cgroup.subtree_control` enables it"
        }
        false => "root, who may make control groups",
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    #[derive(Debug, clap::Parser)]
    struct Line {
        #[command(flatten)]
        io: IoArgs,
    }

    fn parsed(line: &str) -> Result<IoArgs, clap::Error> {
        Line::try_parse_from(line.split(' ')).map(|line| line.io)
    }

    fn limit(device: &str) -> IoLimit {
        IoLimit {
            device: device.into(),
            ..IoLimit::default()
        }
    }

    #[test]
    fn each_flag_sets_its_limit_of_its_device() {
        let line = "x --device-read-bps /dev/sda:1mb --device-write-bps /dev/sda:1.5K \
                    --device-read-iops /dev/disk/by-path/pci-0000:00:1f.2:7 \
                    --device-write-iops /dev/sda:9 --device-read-bps /dev/sda:2g";
        let expected = [
            IoLimit {
                read_bps: Some(1 << 20),
                ..limit("/dev/sda")
            },
            IoLimit {
                read_bps: Some(2 << 30),
                ..limit("/dev/sda")
            },
            IoLimit {
                write_bps: Some(1536),
                ..limit("/dev/sda")
            },
            IoLimit {
                read_iops: Some(7),
                ..limit("/dev/disk/by-path/pci-0000:00:1f.2")
            },
            IoLimit {
                write_iops: Some(9),
                ..limit("/dev/sda")
            },
        ];
        assert_eq!(parsed(line).unwrap().flags(), expected);
    }

    #[test]
    fn limits_are_shown_by_dockers_names() {
        let limits = [
            IoLimit {
                read_bps: Some(2 << 30),
                write_bps: Some(1536),
                write_iops: Some(9),
                ..limit("/dev/sda")
            },
            IoLimit {
                read_iops: Some(7),
                ..limit("/dev/sdb")
            },
        ];
        let mut view = json!({"Memory": 1});
        add_to_view(&mut view, &limits);
        let expected = json!({
            "Memory": 1,
            "BlkioDeviceReadBps": [{"Path": "/dev/sda", "Rate": 2_147_483_648_u64}],
            "BlkioDeviceWriteBps": [{"Path": "/dev/sda", "Rate": 1536}],
            "BlkioDeviceReadIOps": [{"Path": "/dev/sdb", "Rate": 7}],
            "BlkioDeviceWriteIOps": [{"Path": "/dev/sda", "Rate": 9}],
        });
        assert_eq!(view, expected);
    }

    #[test]
    fn what_is_no_device_with_a_rate_is_refused() {
        for (bad, word) in [
            ("--device-read-bps=/dev/sda", "PATH:RATE"),
            ("--device-read-bps=sda:1mb", "PATH:RATE"),
            ("--device-write-bps=:1mb", "PATH:RATE"),
            ("--device-read-bps=/dev/sda:fast", "fast"),
            ("--device-write-bps=/dev/sda:0", "no limit"),
            ("--device-read-iops=/dev/sda:1k", "1k"),
            ("--device-read-iops=/dev/sda:-1", "-1"),
            ("--device-write-iops=/dev/sda:0", "no limit"),
        ] {
            let error = parsed(&format!("x {bad}")).unwrap_err().to_string();
            assert!(error.contains(word), "{bad}: {error}");
        }
        // What is no disk is found before anything is made.
        let args = parsed("x --device-read-bps /dev/null:1mb").unwrap();
        let error = args.limits().unwrap_err().to_string();
        assert!(
            error.contains("/dev/null: it is no block device"),
            "{error}"
        );
    }

    #[test]
    fn an_error_of_the_group_says_what_it_takes() {
        let error = SandboxError::IoLimit(IoLimitError::NoGroup);
        let text = advised(error.into()).to_string();
        assert!(text.contains("control group"), "{text}");
        assert!(text.contains("--device-read-bps"), "{text}");
        assert!(needed(true).contains("cgroup.subtree_control"));
        assert!(needed(false).contains("root"));
        let other = advised(SandboxError::GaveUp.into());
        assert!(other.downcast::<SandboxError>().is_ok());
    }
}
