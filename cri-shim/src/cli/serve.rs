//! `podvisor serve`: the Container Runtime Interface on a socket, for a kubelet.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::thread;

use anyhow::Context as _;
use clap::Args;
use podvisor_images::SignaturePolicy;
use rustix::process::{Resource, getrlimit, setrlimit};
use tokio::signal::unix::{SignalKind, signal};

use super::registries::RegistryArgs;
use super::settings::{self, BootMode, DefaultHandler, Settings, parse_memory};
use super::{Globals, notify};
use crate::cni::{CniOptions, PUBLIC_NETNS_DIR};
use crate::cri::{
    CDI_SPEC_DIRS, GuestSettings, HOST_HANDLER, HostSettings, ImageNames, ServeConfig, Sizes,
    VM_HANDLER, VmSettings, serve,
};
use crate::machine::{Assets, Firmware, GuestFile};
use crate::registries::Registries;
use crate::sandbox::{JailMode, jail};

/// The default socket.
const LISTEN: &str = "/run/podvisor/podvisor.sock";

/// The socket for calls about virtual machines, in the state directory.
const NODE_API: &str = "node.sock";

/// The default state directory.
const STATE: &str = "/run/podvisor";

#[derive(Debug, Default, Args)]
pub(super) struct ServeArgs {
    /// Settings file; `podvisor config default` prints one [default: /etc/podvisor/config.toml
    /// if it is there]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,

    /// Socket to serve on [default: unix:///run/podvisor/podvisor.sock]
    #[arg(long, value_name = "SOCKET", value_parser = parse_socket)]
    listen: Option<PathBuf>,

    /// Socket for calls about virtual machines (docs/node-api.md) [default: node.sock in the
    /// state directory]
    #[arg(long, value_name = "SOCKET", value_parser = parse_socket)]
    node_api: Option<PathBuf>,

    /// Runtime state directory; may be cleared at boot [default: /run/podvisor]
    #[arg(long, value_name = "DIR")]
    state: Option<PathBuf>,

    /// Directory of CNI configuration lists [default: /etc/cni/net.d]
    #[arg(long, value_name = "DIR")]
    cni_conf_dir: Option<PathBuf>,

    /// Directory of CNI plugins; may be given several times [default: /opt/cni/bin, /usr/lib/cni,
    /// /usr/libexec/cni]
    #[arg(long, value_name = "DIR")]
    cni_bin_dir: Vec<PathBuf>,

    /// Directory of CDI specifications; may be given several times, and later ones go before
    /// earlier ones [default: /etc/cdi, /var/run/cdi]
    #[arg(long, value_name = "DIR")]
    cdi_spec_dir: Vec<PathBuf>,

    /// Kernel of guests [default: podvisor's own]
    #[arg(long, value_name = "FILE")]
    kernel: Option<PathBuf>,

    /// Virtual CPUs of a pod without a CPU limit [default: 1]
    #[arg(long, value_name = "N")]
    #[arg(value_parser = clap::value_parser!(u8).range(1..=64))]
    cpus: Option<u8>,

    /// Memory of a guest beyond its pod's limit, with a unit [default: 256M]
    #[arg(long, value_name = "SIZE", value_parser = parse_memory)]
    memory: Option<u64>,

    /// Write what each guest's kernel prints to POD.log in this directory
    #[arg(long, value_name = "DIR")]
    console_dir: Option<PathBuf>,

    /// Serve health (/healthz) and metrics (/metrics) over HTTP on this address, such as
    /// 127.0.0.1:9254
    #[arg(long, value_name = "ADDRESS")]
    metrics: Option<SocketAddr>,

    /// Begin pods as clones of a machine that has booted before (warm), or boot each (cold)
    /// [default: warm]
    #[arg(long, value_name = "HOW", value_enum)]
    boot: Option<BootMode>,

    /// Socket of another CRI runtime on this node, such as
    /// unix:///run/containerd/containerd.sock: it gets the pods that need the node's network, IPC
    /// or PID namespace, or have the runtime handler "host"
    #[arg(long, value_name = "SOCKET", value_parser = parse_socket)]
    host_runtime: Option<PathBuf>,

    /// Runtime handler of pods that name none: with "host", only pods with a RuntimeClass of
    /// podvisor's become virtual machines [default: podvisor]
    #[arg(long, value_name = "HANDLER", value_enum)]
    default_handler: Option<DefaultHandler>,

    /// Do not jail the pods' processes: for hosts that do not let podvisor do so
    #[arg(long)]
    no_jail: bool,

    /// Boot each virtual machine by the loader, without keeping the kernel that it finds for the
    /// image's next machines
    #[arg(long)]
    no_kept_kernels: bool,

    /// Pull only images that this policy allows (containers-policy.json(5)), by registry and
    /// namespace; a changed file is used by the next pull
    #[arg(long, value_name = "FILE")]
    signature_policy: Option<PathBuf>,

    /// Directory of files that say which URLs the names of disk images after virtlet.cloud/ stand
    /// for, as Virtlet has them; changed files are used by the next pull
    #[arg(long, value_name = "DIR")]
    image_translations: Option<PathBuf>,

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

/// Returns the settings of a runtime handler's guests from the file; missing ones are taken from
/// `base`.
fn guest(settings: &settings::GuestSettings, base: &GuestSettings) -> GuestSettings {
    let sizes = base.sizes;
    GuestSettings {
        kernel: settings.kernel.clone().unwrap_or(base.kernel.clone()),
        sizes: Sizes {
            vcpus: settings.cpus.unwrap_or(sizes.vcpus),
            max_vcpus: settings.max_cpus.unwrap_or(sizes.max_vcpus),
            cpu_growth: settings.cpu_growth.unwrap_or(sizes.cpu_growth),
            memory: settings.memory.map_or(sizes.memory, |memory| memory.0),
            growth: settings.growth.map_or(sizes.growth, |growth| growth.0),
            image_slots: settings.images.unwrap_or(sizes.image_slots),
        },
    }
}

impl ServeArgs {
    /// Merges the settings: flags take precedence over the file, and the file over defaults.
    fn merge(&self, globals: &Globals, file: Settings) -> anyhow::Result<ServeConfig> {
        self.merge_with(globals, file, Assets::of_this_process().initramfs()?)
    }

    fn merge_with(
        &self,
        globals: &Globals,
        file: Settings,
        initramfs: PathBuf,
    ) -> anyhow::Result<ServeConfig> {
        let root = match (&globals.root, file.root) {
            (None, Some(root)) => root,
            _ => globals.root()?,
        };
        let state = self.state.clone().or(file.state);
        let state = state.unwrap_or_else(|| PathBuf::from(STATE));
        let mut cni = CniOptions::new(&root, &state);
        // The node's daemon: only one has this directory.
        if state == Path::new(STATE) {
            cni.public_netns_dir = Some(PUBLIC_NETNS_DIR.into());
        }
        if let Some(dir) = self.cni_conf_dir.clone().or(file.cni.config_dir) {
            cni.config_dir = dir;
        }
        if !self.cni_bin_dir.is_empty() {
            cni.plugin_dirs.clone_from(&self.cni_bin_dir);
        } else if let Some(dirs) = file.cni.plugin_dirs {
            cni.plugin_dirs = dirs;
        }
        let cdi_spec_dirs = match (self.cdi_spec_dir.as_slice(), file.cdi_spec_dirs) {
            ([], Some(dirs)) => dirs,
            ([], None) => CDI_SPEC_DIRS.map(PathBuf::from).to_vec(),
            (dirs, _) => dirs.to_vec(),
        };
        let listen = socket("listen", self.listen.as_ref(), file.listen)?;
        let listen = listen.unwrap_or_else(|| PathBuf::from(LISTEN));
        let node_api = socket("node_api", self.node_api.as_ref(), file.node_api)?;
        let node_api = node_api.unwrap_or_else(|| state.join(NODE_API));
        if node_api == listen {
            anyhow::bail!(
                "{} cannot serve both --listen and --node-api; name two sockets",
                listen.display()
            );
        }
        let host_runtime = socket(
            "host_runtime",
            self.host_runtime.as_ref(),
            file.host_runtime,
        )?;
        let default_handler = self.default_handler.or(file.default_handler);
        let is_default = default_handler == Some(DefaultHandler::Host);
        if is_default && host_runtime.is_none() {
            anyhow::bail!(
                "the default handler {HOST_HANDLER:?} needs another runtime: name its socket, with \
                 --host-runtime or the setting `host_runtime`"
            );
        }
        if host_runtime.as_ref() == Some(&listen) {
            anyhow::bail!(
                "the host's runtime cannot be podvisor itself ({})",
                listen.display()
            );
        }
        if host_runtime.is_some() && file.handlers.contains_key(HOST_HANDLER) {
            anyhow::bail!(
                "the setting `handlers.{HOST_HANDLER}`: with a `host_runtime`, that handler is for \
                 its pods; give these guests another name"
            );
        }
        if file.handlers.contains_key(VM_HANDLER) {
            anyhow::bail!(
                "the setting `handlers.{VM_HANDLER}`: that handler is for pods that are virtual \
                 machines; give these guests another name"
            );
        }
        let host_runtime = host_runtime.map(|socket| HostSettings { socket, is_default });
        let wanted = settings::GuestSettings {
            kernel: self.kernel.clone().or(file.guest.kernel),
            cpus: self.cpus.or(file.guest.cpus),
            memory: self.memory.map(settings::Memory).or(file.guest.memory),
            ..file.guest
        };
        let base = GuestSettings {
            kernel: match &wanted.kernel {
                Some(kernel) => kernel.clone(),
                None => Assets::of_this_process().kernel()?,
            },
            sizes: Sizes::default(),
        };
        let base = guest(&wanted, &base);
        let handlers = file.handlers.iter();
        let handlers = handlers.map(|(name, settings)| (name.clone(), guest(settings, &base)));
        let registries = self.registries.clone().or_hosts_dir(file.hosts_dir);
        let policy = self.signature_policy.as_ref();
        if let Some(policy) = policy.or(file.signature_policy.as_ref()) {
            SignaturePolicy::read(policy)
                .with_context(|| format!("cannot use the policy {}", policy.display()))?;
        }
        let image_names = self.image_translations.clone().or(file.image_translations);
        let required_layers = file.require.unwrap_or_default();
        if self.no_jail && !required_layers.is_empty() {
            anyhow::bail!("the setting `require` names layers of the jail: leave out --no-jail");
        }
        Ok(ServeConfig {
            map_users: file.map_users.unwrap_or(true),
            required_layers,
            listen,
            node_api,
            handlers: handlers.collect(),
            guest: base,
            vm: VmSettings {
                kernel: Assets::of_this_process().expected(GuestFile::LoaderKernel),
                initramfs: Assets::of_this_process().expected(GuestFile::Loader),
                keeps_kernels: !self.no_kept_kernels,
                firmware: match file.vm.firmware {
                    Some(path) => {
                        Firmware::open(&path).context("the setting `vm.firmware`")?;
                        path
                    }
                    None => Assets::of_this_process().expected(GuestFile::Firmware),
                },
                guest_agent: Assets::of_this_process().expected(GuestFile::GuestAgent),
            },
            initramfs,
            cni,
            cdi_spec_dirs,
            registries: Registries::of(registries.directory())?,
            signature_policy: self.signature_policy.clone().or(file.signature_policy),
            image_names: ImageNames::of(image_names)?,
            metrics: self.metrics.or(file.metrics),
            consoles: self.console_dir.clone().or(file.console_dir),
            templates: self.boot.or(file.boot).unwrap_or_default().templates(&root),
            jail: match self.no_jail {
                true => JailMode::Disabled,
                false => JailMode::Enforced,
            },
            root,
            state,
            host_runtime,
        })
    }
}

/// Returns the path of a socket from a flag, or else from the setting `name`.
fn socket(
    name: &str,
    flag: Option<&PathBuf>,
    setting: Option<String>,
) -> anyhow::Result<Option<PathBuf>> {
    let read = |text: String| {
        parse_socket(&text).map_err(|reason| anyhow::anyhow!("invalid setting `{name}`: {reason}"))
    };
    match flag {
        Some(path) => Ok(Some(path.clone())),
        None => setting.map(read).transpose(),
    }
}

/// Returns an error for each file that a settings file names and that is missing, with what to do.
pub(super) fn faults(globals: &Globals, file: Settings) -> anyhow::Result<Vec<String>> {
    let config = ServeArgs::default().merge(globals, file)?;
    let guests = [("guest", &config.guest)].into_iter();
    let guests = guests.chain(config.handlers.iter().map(|(name, g)| (name.as_str(), g)));
    let kernels = guests.map(|(name, guest)| {
        let todo = "name a kernel that is, or install podvisor's";
        (format!("{name}: kernel"), guest.kernel.clone(), todo)
    });
    let dirs = [(
        "cni.config_dir".to_owned(),
        config.cni.config_dir.clone(),
        "pods have no network, and the node is not ready, until a network plugin puts its \
         configuration there, or you do",
    )];
    let sockets = config.host_runtime.into_iter().map(|host| {
        let todo = "start that runtime, or correct the path";
        ("host_runtime".to_owned(), host.socket, todo)
    });
    let named = kernels.chain(dirs).chain(sockets);
    Ok(named
        .filter(|(_, path, _)| !path.exists())
        .map(|(what, path, todo)| format!("{what}: {} is not there; {todo}", path.display()))
        .collect())
}

/// Raises the limit of open files to the maximum: each pod has some, and many may start at the same
/// time.
fn raise_files() {
    let mut files = getrlimit(Resource::Nofile);
    files.current = files.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, files) {
        tracing::warn!(%error, "failed to raise RLIMIT_NOFILE");
    }
}

/// Returns the number of threads for asynchronous work, which mostly waits, on a host of `cpus`.
fn workers(cpus: usize) -> usize {
    const MOST: usize = 16;
    cpus.clamp(1, MOST)
}

pub(super) fn run(globals: &Globals, args: &ServeArgs) -> anyhow::Result<u8> {
    let config = args.merge(globals, Settings::read(args.config.as_deref())?)?;
    if let Some(dir) = &config.consoles {
        std::fs::create_dir_all(dir)
            .with_context(|| format!("cannot create the directory {}", dir.display()))?;
    }
    if Assets::of_this_process().lacks_retpolines() {
        tracing::warn!(
            "containers of one pod could read each other's memory on this CPU: `podvisor check`"
        );
    }
    raise_files();
    jail::limit_arenas();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(workers(
            thread::available_parallelism().map_or(1, usize::from),
        ))
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
        let stop = async {
            stop.await;
            notify::tell("STOPPING=1");
        };
        anyhow::Ok(serve(config, stop, || notify::tell("READY=1")).await?)
    })?;
    // A read of an exec's output may block forever.
    runtime.shutdown_background();
    Ok(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_large_host_does_not_get_a_thread_for_each_cpu() {
        assert_eq!([0, 1, 4, 16, 512].map(workers), [1, 1, 4, 16, 16]);
    }

    fn merged(args: &ServeArgs, file: &str) -> ServeConfig {
        let globals = Globals {
            root: Some("/root-of-test".into()),
            log_level: None,
            log_format: crate::cli::LogFormat::Text,
            kept: Default::default(),
        };
        let mut file = Settings::parse(file).unwrap();
        // The guest's own files may not have been built here.
        file.guest.kernel.get_or_insert("/kernel-of-test".into());
        args.merge_with(&globals, file, PathBuf::from("/initramfs-of-test"))
            .unwrap()
    }

    #[test]
    fn required_layers_need_a_jail() {
        let file = "require = [\"landlock\", \"control-group\"]";
        let config = merged(&ServeArgs::default(), file);
        assert_eq!(config.required_layers.len(), 2);
        let globals = Globals {
            root: Some("/root-of-test".into()),
            log_level: None,
            log_format: crate::cli::LogFormat::Text,
            kept: Default::default(),
        };
        let mut file = Settings::parse(file).unwrap();
        file.guest.kernel = Some("/kernel-of-test".into());
        let args = ServeArgs {
            no_jail: true,
            ..ServeArgs::default()
        };
        let refused = args.merge_with(&globals, file, "/initramfs-of-test".into());
        assert!(refused.unwrap_err().to_string().contains("--no-jail"));
    }

    #[test]
    fn flags_go_before_the_file_and_the_file_before_defaults() {
        let file = r#"
            listen = "unix:///x.sock"
            metrics = "127.0.0.1:1"
            cdi_spec_dirs = ["/cdi"]
            [cni]
            config_dir = "/net.d"
            [guest]
            cpus = 2
            memory = "128M"
            [handlers.large]
            memory = "1G"
            kernel = "/other"
        "#;
        let config = merged(&ServeArgs::default(), file);
        assert_eq!(config.listen, PathBuf::from("/x.sock"));
        assert_eq!(config.state, PathBuf::from(STATE));
        assert_eq!(config.cni.config_dir, PathBuf::from("/net.d"));
        assert_eq!(config.cdi_spec_dirs, [PathBuf::from("/cdi")]);
        assert_eq!(config.guest.sizes.vcpus, 2);
        let large = &config.handlers["large"];
        assert_eq!((large.sizes.vcpus, large.sizes.memory), (2, 1 << 30));
        assert_eq!(large.kernel, PathBuf::from("/other"));

        let flags = ServeArgs {
            listen: Some("/y.sock".into()),
            cpus: Some(3),
            cdi_spec_dir: vec!["/a".into(), "/b".into()],
            ..ServeArgs::default()
        };
        let config = merged(&flags, file);
        assert_eq!(config.cdi_spec_dirs, ["/a", "/b"].map(PathBuf::from));
        assert_eq!(config.listen, PathBuf::from("/y.sock"));
        let sizes = config.guest.sizes;
        assert_eq!((sizes.vcpus, sizes.memory), (3, 128 << 20));
        assert_eq!(config.handlers["large"].sizes.vcpus, 3);
        let config = merged(&ServeArgs::default(), "");
        let dirs = ["/etc/cdi", "/var/run/cdi"].map(PathBuf::from);
        assert_eq!(config.cdi_spec_dirs, dirs);
    }

    #[test]
    fn the_hosts_runtime_is_another_one_and_has_its_handler_alone() {
        let of = |file: &str| {
            let mut file = Settings::parse(file).unwrap();
            file.guest.kernel.get_or_insert("/kernel-of-test".into());
            let globals = Globals {
                root: Some("/root-of-test".into()),
                log_level: None,
                log_format: crate::cli::LogFormat::Text,
                kept: Default::default(),
            };
            let config = ServeArgs::default().merge_with(&globals, file, "/initramfs".into());
            config.map(|config| {
                config
                    .host_runtime
                    .map(|host| (host.socket, host.is_default))
            })
        };
        assert_eq!(of("[handlers.host]").unwrap(), None);
        let socket = "host_runtime = \"unix:///c.sock\"\n";
        assert_eq!(of(socket).unwrap(), Some(("/c.sock".into(), false)));
        let default = "default_handler = \"host\"\n";
        let both = of(&format!("{default}{socket}")).unwrap();
        assert_eq!(both, Some(("/c.sock".into(), true)));
        let alone = of(default).unwrap_err();
        assert!(alone.to_string().contains("--host-runtime"), "{alone}");
        let both = of(&format!("{socket}[handlers.host]")).unwrap_err();
        assert!(both.to_string().contains("handlers.host"), "{both}");
        let itself = of(&format!("{socket}listen = \"/c.sock\"")).unwrap_err();
        assert!(itself.to_string().contains("podvisor itself"), "{itself}");
        let relative = of("host_runtime = \"c.sock\"").unwrap_err();
        assert!(
            relative.to_string().contains("`host_runtime`"),
            "{relative}"
        );
    }

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
