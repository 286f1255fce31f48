//! Limits of a machine's I/O on block devices of the host: docker's flags, their errors, and
//! docker's names of them in `inspect`.

use std::io::ErrorKind;
use std::path::PathBuf;

use clap::Args;
use serde_json::{Value, json};

use super::size;
use crate::sandbox::{CgroupError, IoLimit, IoLimitError, SandboxError, merge_io_limits};

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
        Some(SandboxError::IoLimit(IoLimitError::Group(group))) => {
            let is_root = rustix::process::geteuid().is_root();
            // The whole chain first: a context would be printed before it.
            let said = super::message(&error);
            anyhow::Error::msg(format!(
                "{said}; {}without --device-read-bps and its like, the machine runs unlimited",
                advice(group, is_root)
            ))
        }
        _ => error,
    }
}

/// Returns what makes such a group possible, with a semicolon; nothing if that is unknown.
fn advice(error: &CgroupError, is_root: bool) -> String {
    match error {
        CgroupError::NotThere => "limits of I/O take cgroup v2, which systemd mounts there if the \
             kernel's command line has systemd.unified_cgroup_hierarchy=1; "
            .to_owned(),
        CgroupError::NoController(_) => "a kernel with CONFIG_BLK_CGROUP has it, unless cgroup v1 \
             uses it as blkio: see the mounts of type cgroup in /proc/mounts; "
            .to_owned(),
        CgroupError::NotEnabled { controller, group } => format!(
            "as root, `echo +{controller} >{}/cgroup.subtree_control` enables it or says why not; ",
            group.display()
        ),
        CgroupError::NoFile(_) => "a kernel with CONFIG_BLK_DEV_THROTTLING has it; ".to_owned(),
        CgroupError::Value { source, .. } | CgroupError::Step { source, .. }
            if matches!(
                source.kind(),
                ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem
            ) =>
        {
            match is_root {
                true => {
                    "limits of I/O take control groups that can be written, which those of a \
                         container seldom are; "
                }
                false => "limits of I/O take root, who may make control groups; ",
            }
            .to_owned()
        }
        CgroupError::Value { .. } => {
            "the kernel does not take this limit: see that the disk is still there, or give \
             another rate; "
                .to_owned()
        }
        _ => String::new(),
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
    fn each_error_of_the_group_says_what_it_takes() {
        let value = |kind: ErrorKind| CgroupError::Value {
            value: "8:0 rbps=1".to_owned(),
            path: "/sys/fs/cgroup/podvisor/x/io.max".into(),
            source: kind.into(),
        };
        let step = |kind: ErrorKind| CgroupError::Step {
            step: "create the control group",
            path: "/sys/fs/cgroup/podvisor".into(),
            source: kind.into(),
        };
        let not_enabled = || CgroupError::NotEnabled {
            controller: "io",
            group: "/sys/fs/cgroup/a".into(),
        };
        let no_file = CgroupError::NoFile("/sys/fs/cgroup/podvisor/x/io.max".into());
        let denied = ErrorKind::PermissionDenied;
        for (error, is_root, words) in [
            (CgroupError::NotThere, true, "unified_cgroup_hierarchy"),
            (CgroupError::NoController("io"), true, "CONFIG_BLK_CGROUP"),
            (
                not_enabled(),
                true,
                "`echo +io >/sys/fs/cgroup/a/cgroup.subtree_control`",
            ),
            (not_enabled(), false, "as root"),
            (no_file, true, "CONFIG_BLK_DEV_THROTTLING"),
            (step(denied), false, "take root"),
            (step(denied), true, "a container"),
            (step(ErrorKind::ReadOnlyFilesystem), true, "a container"),
            (value(denied), false, "take root"),
            (value(ErrorKind::InvalidInput), true, "another rate"),
        ] {
            let advice = advice(&error, is_root);
            assert!(advice.contains(words), "{error}: {advice}");
            assert!(advice.ends_with("; "), "{error}: {advice}");
        }
        assert_eq!(advice(&step(ErrorKind::OutOfMemory), true), "");
    }

    #[test]
    fn an_error_of_the_group_is_told_with_advice_and_others_stay_as_they_are() {
        let error = IoLimitError::from(CgroupError::NoController("io"));
        let text = advised(SandboxError::from(error).into()).to_string();
        for words in [
            "cannot limit",
            "cgroup.controllers",
            "CONFIG_BLK_CGROUP",
            "--device-read-bps",
        ] {
            assert!(text.contains(words), "{words}: {text}");
        }
        let other = advised(SandboxError::GaveUp.into());
        assert!(other.downcast::<SandboxError>().is_ok());
    }
}
