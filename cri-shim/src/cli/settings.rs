//! The daemon's settings file: TOML, each key optional. Flags take precedence.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use clap::ValueEnum as _;
use serde::{Deserialize, Serialize};

use super::size;
use crate::machine::GROWTH_UNIT;
use crate::sandbox::JailLayer;

/// Read if it exists and no other file is given.
pub(super) const PATH: &str = "/etc/podvisor/config.toml";

/// Maximum size of the file, in bytes.
const MAX_BYTES: u64 = 1 << 20;

/// All keys of a file, with their defaults, as comments.
pub(super) const DEFAULT_TEXT: &str = include_str!("settings.toml");

/// Directory of templates of machines, within the root.
pub(super) const TEMPLATES: &str = "templates";

/// With less, there is not enough memory for the guest's kernel and agent.
const MEMORY_MIN: u64 = 64 << 20;

/// Environment variable for how the machines of commands start; flags take precedence.
const BOOT_VARIABLE: &str = "PODVISOR_BOOT";

/// The file.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Settings {
    pub(super) listen: Option<String>,
    pub(super) node_api: Option<String>,
    pub(super) root: Option<PathBuf>,
    pub(super) state: Option<PathBuf>,
    pub(super) console_dir: Option<PathBuf>,
    pub(super) hosts_dir: Option<PathBuf>,
    pub(super) signature_policy: Option<PathBuf>,
    pub(super) image_translations: Option<PathBuf>,
    pub(super) cdi_spec_dirs: Option<Vec<PathBuf>>,
    pub(super) host_runtime: Option<String>,
    pub(super) default_handler: Option<DefaultHandler>,
    pub(super) metrics: Option<SocketAddr>,
    pub(super) boot: Option<BootMode>,
    pub(super) require: Option<Vec<JailLayer>>,
    pub(super) map_users: Option<bool>,
    pub(super) cni: CniSettings,
    pub(super) guest: GuestSettings,
    pub(super) vm: VmSettings,
    pub(super) handlers: BTreeMap<String, GuestSettings>,
}

/// The runtime handler of pods that name none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(super) enum DefaultHandler {
    /// A guest of the default handler.
    Podvisor,
    /// The host's runtime.
    Host,
}

/// How machines begin.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(super) enum BootMode {
    /// As clones of one that has booted, once there is one.
    #[default]
    Warm,
    /// By booting.
    Cold,
}

impl BootMode {
    fn of_word(word: &OsStr) -> anyhow::Result<Self> {
        let mode = word.to_str().map(|word| Self::from_str(word, true));
        let mode = mode.and_then(Result::ok);
        mode.with_context(|| {
            format!(
                "{BOOT_VARIABLE}={} is neither warm nor cold",
                word.display()
            )
        })
    }

    /// Returns the directory of templates of machines below the root, if templates are used.
    pub(super) fn templates(self, root: &Path) -> Option<PathBuf> {
        (self == Self::Warm).then(|| root.join(TEMPLATES))
    }
}

/// How the machine of a command begins.
#[derive(Debug, clap::Args)]
pub(super) struct BootArgs {
    /// How the guest begins: warm, as a clone of one that has booted already, or cold, by booting
    /// [env: PODVISOR_BOOT] [default: warm]
    // Not clap's `env`: the variable applies to all machines and must not conflict with flags.
    #[arg(long, value_name = "HOW", value_enum, hide_possible_values = true)]
    boot: Option<BootMode>,
}

impl BootArgs {
    pub(super) fn mode(&self) -> anyhow::Result<BootMode> {
        match (self.boot, std::env::var_os(BOOT_VARIABLE)) {
            (Some(mode), _) => Ok(mode),
            (None, Some(word)) => BootMode::of_word(&word),
            (None, None) => Ok(BootMode::default()),
        }
    }
}

/// Table `cni` of the file.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct CniSettings {
    pub(super) config_dir: Option<PathBuf>,
    pub(super) plugin_dirs: Option<Vec<PathBuf>>,
}

/// Table `vm` of the file.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct VmSettings {
    pub(super) firmware: Option<PathBuf>,
}

/// Tables `guest` and `handlers.NAME` of the file.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct GuestSettings {
    pub(super) kernel: Option<PathBuf>,
    pub(super) cpus: Option<u8>,
    pub(super) max_cpus: Option<u8>,
    pub(super) cpu_growth: Option<u8>,
    pub(super) memory: Option<Memory>,
    pub(super) growth: Option<Growth>,
    pub(super) images: Option<u8>,
}

/// A size in bytes, written with a unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Memory(pub(super) u64);

impl<'de> Deserialize<'de> for Memory {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        parse_memory(&text)
            .map(Self)
            .map_err(serde::de::Error::custom)
    }
}

/// Parses a guest's memory size, and checks it against the minimum.
pub(super) fn parse_memory(text: &str) -> Result<u64, String> {
    let bytes = size::parse(text).map_err(|error| error.to_string())?;
    match bytes >= MEMORY_MIN {
        true => Ok(bytes),
        false => Err(format!("a guest needs at least {}M", MEMORY_MIN >> 20)),
    }
}

/// The bytes by which a guest may grow, written with a unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Growth(pub(super) u64);

/// Growth reserves addresses: no machine has more than this.
pub(super) const MAX_GROWTH: u64 = 1 << 40;

impl<'de> Deserialize<'de> for Growth {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let bytes = size::parse(&text).map_err(serde::de::Error::custom)?;
        match bytes.is_multiple_of(GROWTH_UNIT) && bytes <= MAX_GROWTH {
            true => Ok(Self(bytes)),
            false => Err(serde::de::Error::custom(format!(
                "{text} is not a multiple of 128M up to 1T"
            ))),
        }
    }
}

/// Range of the number of a guest's virtual CPUs.
pub(super) const CPUS_RANGE: std::ops::RangeInclusive<u8> = 1..=64;

/// Range of the number of virtual CPUs that may be added at run time.
const CPU_GROWTH_RANGE: std::ops::RangeInclusive<u8> = 0..=63;

/// Range of the number of images of one pod.
const IMAGES_RANGE: std::ops::RangeInclusive<u8> = 1..=10;

impl Settings {
    /// Reads the file at `path`; without `path`, the one at [`PATH`] if it exists.
    pub(super) fn read(path: Option<&Path>) -> anyhow::Result<Self> {
        Self::read_by(path, Self::parse)
    }

    fn read_by<T: Default>(
        path: Option<&Path>,
        parse: fn(&str) -> anyhow::Result<T>,
    ) -> anyhow::Result<T> {
        use std::io::Read as _;
        let (path, is_wanted) = match path {
            Some(path) => (path, true),
            None => (Path::new(PATH), false),
        };
        let context = || format!("cannot read the settings in {}", path.display());
        let file = match std::fs::File::open(path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound && !is_wanted => {
                return Ok(T::default());
            }
            opened => opened.with_context(context)?,
        };
        let mut text = String::new();
        file.take(MAX_BYTES + 1)
            .read_to_string(&mut text)
            .with_context(context)?;
        if text.len() as u64 > MAX_BYTES {
            bail!("{} is longer than {MAX_BYTES} bytes", path.display());
        }
        parse(&text).with_context(|| format!("invalid settings in {}", path.display()))
    }

    /// Parses the text of a file.
    pub(super) fn parse(text: &str) -> anyhow::Result<Self> {
        let settings: Self = toml::from_str(text)?;
        settings.guest.check("guest")?;
        for (name, guest) in &settings.handlers {
            check_name(name)?;
            guest.check(&format!("handlers.{name}"))?;
        }
        Ok(settings)
    }
}

impl CniSettings {
    /// Reads this table of the default file. What else is in the file is the daemon's, and may be
    /// of a later version, which keeps no container from losing its network.
    pub(super) fn read() -> anyhow::Result<Self> {
        Settings::read_by(None, Self::parse)
    }

    fn parse(text: &str) -> anyhow::Result<Self> {
        let mut file: toml::Table = toml::from_str(text)?;
        let Some(toml::Value::Table(mut own)) = file.remove("cni") else {
            return Ok(Self::default());
        };
        let known = serde_json::to_value(Self::default())?;
        own.retain(|key, _| known.get(key).is_some());
        Ok(own.try_into()?)
    }
}

impl GuestSettings {
    fn check(&self, table: &str) -> anyhow::Result<()> {
        for (key, value, range) in [
            ("cpus", self.cpus, CPUS_RANGE),
            ("max_cpus", self.max_cpus, CPUS_RANGE),
            ("cpu_growth", self.cpu_growth, CPU_GROWTH_RANGE),
            ("images", self.images, IMAGES_RANGE),
        ] {
            if let Some(value) = value.filter(|value| !range.contains(value)) {
                let (least, most) = (range.start(), range.end());
                bail!("{table}.{key} is {value}: it is a number from {least} to {most}");
            }
        }
        Ok(())
    }
}

/// Checks the name of a runtime handler: Kubernetes requires a DNS label.
fn check_name(name: &str) -> anyhow::Result<()> {
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    let is_label = !name.is_empty()
        && name.len() <= 63
        && name.bytes().all(plain)
        && !name.starts_with('-')
        && !name.ends_with('-');
    if !is_label {
        bail!("handlers.{name:?}: a name has small letters, digits and hyphens");
    }
    if name == crate::cri::HANDLER {
        bail!("handlers.{name} is the default handler: write its settings into [guest]");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_text_says_nothing_and_its_comments_are_valid_settings() {
        assert_eq!(Settings::parse(DEFAULT_TEXT).unwrap(), Settings::default());
        // In explanations, a blank follows the hash sign; in settings it does not.
        let lines = DEFAULT_TEXT
            .lines()
            .map(|line| match line.strip_prefix('#') {
                Some(rest) if !rest.starts_with(' ') => rest,
                _ => line,
            });
        let text: Vec<&str> = lines.collect();
        let text = text.join("\n");
        let settings = Settings::parse(&text).unwrap();
        assert_eq!(CniSettings::parse(&text).unwrap(), settings.cni);
        assert_eq!(
            settings.listen.as_deref(),
            Some("unix:///run/podvisor/podvisor.sock")
        );
        assert!(settings.root.is_some() && settings.state.is_some());
        assert!(settings.console_dir.is_some() && settings.hosts_dir.is_some());
        assert!(settings.signature_policy.is_some());
        assert!(settings.image_translations.is_some());
        assert!(settings.metrics.is_some() && settings.host_runtime.is_some());
        assert_eq!(settings.default_handler, Some(DefaultHandler::Podvisor));
        let cdi_spec_dirs = settings.cdi_spec_dirs.unwrap();
        assert_eq!(cdi_spec_dirs, crate::cri::CDI_SPEC_DIRS.map(PathBuf::from));
        assert_eq!(settings.require.as_ref().map(Vec::len), Some(5));
        assert_eq!(settings.map_users, Some(true));
        assert!(settings.cni.config_dir.is_some());
        let plugin_dirs = settings.cni.plugin_dirs.unwrap();
        assert_eq!(plugin_dirs, crate::cni::PLUGIN_DIRS.map(PathBuf::from));
        let guest = &settings.guest;
        assert!(guest.kernel.is_some() && guest.cpus == Some(1) && guest.max_cpus == Some(64));
        assert_eq!(guest.memory, Some(Memory(crate::cri::DEFAULT_MEMORY)));
        assert_eq!(guest.growth, Some(Growth(crate::cri::DEFAULT_GROWTH)));
        assert_eq!(guest.cpu_growth, Some(crate::cri::DEFAULT_CPU_GROWTH));
        assert!(guest.images.is_some());
        assert!(settings.vm.firmware.is_some());
        assert_eq!(settings.handlers.len(), 1);
    }

    #[test]
    fn the_directories_of_cni_are_read_from_a_later_versions_file() {
        let text = "later = 1\n[cni]\nplugin_dirs = [\"/x\"]\nlater = 2\n[later_table]\n";
        Settings::parse(text).unwrap_err();
        let cni = CniSettings::parse(text).unwrap();
        assert_eq!(cni.plugin_dirs, Some(vec![PathBuf::from("/x")]));
        assert_eq!(CniSettings::parse("").unwrap(), CniSettings::default());
        CniSettings::parse("[cni]\nplugin_dirs = 1").unwrap_err();
        CniSettings::parse("[cni").unwrap_err();
    }

    #[test]
    fn the_plugins_of_other_distributions_are_looked_for() {
        for (dir, distribution) in [("/usr/lib/cni", "Debian"), ("/usr/libexec/cni", "Fedora")] {
            assert!(crate::cni::PLUGIN_DIRS.contains(&dir), "{distribution}");
        }
    }

    #[test]
    fn mistakes_are_told_with_their_place() {
        for (text, told) in [
            ("lissten = 1", "lissten"),
            ("[guest]\nmemory = \"1M\"", "64M"),
            ("[guest]\nmemory = \"many\"", "many"),
            ("[guest]\ngrowth = \"100M\"", "128M"),
            ("[guest]\ngrowth = \"2000G\"", "1T"),
            ("[guest]\ncpus = 0", "guest.cpus"),
            ("[guest]\nimages = 11", "guest.images"),
            ("[handlers.fast]\ncpus = 65", "handlers.fast.cpus"),
            ("[handlers.Fast]\n", "Fast"),
            ("[handlers.podvisor]\n", "default handler"),
            ("metrics = \"here\"", "metrics"),
            ("require = [\"walls\"]", "landlock"),
        ] {
            let error = format!("{:#}", Settings::parse(text).unwrap_err());
            assert!(error.contains(told), "{text}: {error}");
        }
    }

    #[test]
    fn a_file_that_is_named_must_be_there() {
        let missing = Path::new("/nonexistent/podvisor.toml");
        assert!(Settings::read(Some(missing)).is_err());
    }
}
