//! `podvisor version`: shows podvisor's version and the guest files that it would use.

use std::path::PathBuf;

use clap::Args;

use super::FormatArgs;
use podvisor_agent_protocol::PROTOCOL_VERSION;
use serde::Serialize;

use crate::machine::Assets;
use crate::sandbox::SPEC_VERSION;

#[derive(Debug, Args)]
pub(super) struct VersionArgs {
    #[command(flatten)]
    shown: FormatArgs,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Version {
    version: &'static str,
    agent_protocol: u32,
    oci_runtime_spec: &'static str,
    os: &'static str,
    arch: &'static str,
    /// `None` if it is missing.
    kernel: Option<PathBuf>,
    initramfs: Option<PathBuf>,
}

pub(super) fn run(args: &VersionArgs) -> anyhow::Result<u8> {
    let assets = Assets::of_this_process();
    let version = Version {
        version: env!("CARGO_PKG_VERSION"),
        agent_protocol: PROTOCOL_VERSION,
        oci_runtime_spec: SPEC_VERSION,
        os: std::env::consts::OS,
        arch: std::env::consts::ARCH,
        kernel: assets.kernel().ok(),
        initramfs: assets.initramfs().ok(),
    };
    if args.shown.is_json() {
        super::print_json(&version)?;
    } else {
        super::print(&version.to_text())?;
    }
    Ok(0)
}

impl Version {
    fn to_text(&self) -> String {
        let file = |file: &Option<PathBuf>| match file {
            Some(file) => file.display().to_string(),
            None => "not found".to_owned(),
        };
        let lines = [
            ("podvisor", self.version.to_owned()),
            ("platform", format!("{}/{}", self.os, self.arch)),
            ("agent protocol", self.agent_protocol.to_string()),
            ("OCI runtime spec", self.oci_runtime_spec.to_owned()),
            ("guest kernel", file(&self.kernel)),
            ("guest initramfs", file(&self.initramfs)),
        ];
        let line = |(name, value): (&str, String)| format!("{name:<17} {value}\n");
        lines.into_iter().map(line).collect()
    }
}
