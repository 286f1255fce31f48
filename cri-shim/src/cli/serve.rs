//! `podvisor serve`: the Container Runtime Interface on a socket, for a kubelet.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::Args;
use tokio::signal::unix::{SignalKind, signal};

use super::registries::RegistryArgs;
use super::{Globals, size};
use crate::cni::CniOptions;
use crate::cri::{DEFAULT_MEMORY, ServeConfig, Sizes, serve};
use crate::machine::Assets;

#[derive(Debug, Args)]
pub(super) struct ServeArgs {
    /// Socket to serve on
    #[arg(
        long,
        value_name = "SOCKET",
        default_value = "unix:///run/podvisor/podvisor.sock"
    )]
    #[arg(value_parser = parse_socket)]
    listen: PathBuf,

    /// Directory of what runs; it need not outlive a boot
    #[arg(long, value_name = "DIR", default_value = "/run/podvisor")]
    state: PathBuf,

    /// Directory of CNI configuration lists
    #[arg(long, value_name = "DIR", default_value = "/etc/cni/net.d")]
    cni_conf_dir: PathBuf,

    /// Directory of CNI plugins; may be given several times [default: /opt/cni/bin, /usr/lib/cni]
    #[arg(long, value_name = "DIR")]
    cni_bin_dir: Vec<PathBuf>,

    /// Kernel of guests [default: podvisor's own]
    #[arg(long, value_name = "FILE")]
    kernel: Option<PathBuf>,

    /// Virtual CPUs of a pod without a CPU limit
    #[arg(long, value_name = "N", default_value = "1")]
    #[arg(value_parser = clap::value_parser!(u8).range(1..=64))]
    cpus: u8,

    /// Memory of a guest beyond its pod's limit, with a unit [default: 256M]
    #[arg(long, value_name = "SIZE", value_parser = parse_memory)]
    memory: Option<u64>,

    /// Write what each guest's kernel prints to POD.log in this directory
    #[arg(long, value_name = "DIR")]
    console_dir: Option<PathBuf>,

    #[command(flatten)]
    registries: RegistryArgs,
}

fn parse_socket(text: &str) -> Result<PathBuf, String> {
    let path = text.strip_prefix("unix://").unwrap_or(text);
    match Path::new(path).is_absolute() {
        true => Ok(PathBuf::from(path)),
        false => Err("write the socket as unix:///PATH".to_owned()),
    }
}

fn parse_memory(text: &str) -> Result<u64, String> {
    let bytes = size::parse(text).map_err(|error| error.to_string())?;
    match bytes >= 64 << 20 {
        true => Ok(bytes),
        false => Err("a guest needs at least 64M".to_owned()),
    }
}

impl ServeArgs {
    fn config(&self, globals: &Globals) -> anyhow::Result<ServeConfig> {
        let assets = Assets::of_this_process();
        let root = globals.root()?;
        let mut cni = CniOptions::new(&root, &self.state);
        cni.config_dir.clone_from(&self.cni_conf_dir);
        if !self.cni_bin_dir.is_empty() {
            cni.plugin_dirs.clone_from(&self.cni_bin_dir);
        }
        if let Some(dir) = &self.console_dir {
            std::fs::create_dir_all(dir)
                .with_context(|| format!("cannot create the directory {}", dir.display()))?;
        }
        Ok(ServeConfig {
            listen: self.listen.clone(),
            state: self.state.clone(),
            kernel: match &self.kernel {
                Some(kernel) => kernel.clone(),
                None => assets.kernel()?,
            },
            initramfs: assets.initramfs()?,
            cni,
            registries: self.registries.config()?,
            sizes: Sizes {
                vcpus: self.cpus,
                memory: self.memory.unwrap_or(DEFAULT_MEMORY),
                ..Sizes::default()
            },
            consoles: self.console_dir.clone(),
            root,
        })
    }
}

pub(super) fn run(globals: &Globals, args: &ServeArgs) -> anyhow::Result<u8> {
    let config = args.config(globals)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .context("cannot start the asynchronous runtime")?;
    runtime.block_on(async {
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut terminate = signal(SignalKind::terminate())?;
        let stop = async {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
            }
        };
        anyhow::Ok(serve(config, stop).await?)
    })?;
    // A read of an exec's output may never end.
    runtime.shutdown_background();
    Ok(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sockets_are_absolute_paths() {
        let path = PathBuf::from("/run/x.sock");
        assert_eq!(parse_socket("unix:///run/x.sock").unwrap(), path);
        assert_eq!(parse_socket("/run/x.sock").unwrap(), path);
        for bad in ["x.sock", "unix://x", "tcp://1.2.3.4:5", ""] {
            assert!(parse_socket(bad).is_err(), "{bad}");
        }
    }
}
