//! A guest's seed, and the documents that are made of it.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::agent;
use crate::error::{MAX_ENTRIES, SeedError, SeedErrors};
use crate::fat::{FatError, Volume};
use crate::files::{GuestFile, check_path};
use crate::keys;
use crate::network::NetworkConfig;
use crate::scripts::{self, DeviceLink, GuestMount, MAX_SERIAL};
use crate::user_data::{self, HEADER, Parsed, UserData};
use crate::yaml::Node;

/// Where the guest's environment is.
const ENVIRONMENT: &str = "/etc/cloud/environment";
/// Longest name of an instance or host.
const MAX_NAME: usize = 253;

/// How the documents lie on the disk.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Form {
    /// A volume `cidata` with `meta-data`, `user-data` and `network-config`.
    #[default]
    NoCloud,
    /// OpenStack's volume `config-2`.
    ConfigDrive,
}

/// Who a guest is, and what it is to have.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct GuestSeed {
    /// How the documents lie on the disk.
    pub form: Form,
    /// By this a guest knows whether it is a new one: with another one it does all again that is
    /// done once for each instance, such as making SSH's host keys.
    pub instance_id: String,
    /// The guest's name.
    pub host_name: String,
    /// Keys with which the default user can log in, each as one line.
    pub ssh_keys: Vec<String>,
    /// A mapping in YAML whose keys win over those that are made here.
    pub meta_data: Option<String>,
    /// The user's own configuration.
    pub user_data: UserData,
    /// The network.
    pub network: NetworkConfig,
    /// Files, in the order in which they are written: secrets, ConfigMaps, single files.
    pub files: Vec<GuestFile>,
    /// Variables for `/etc/cloud/environment`, in this order.
    pub environment: Vec<(String, String)>,
    /// Paths under which the guest finds disks.
    pub devices: Vec<DeviceLink>,
    /// Disks and shares that are mounted.
    pub mounts: Vec<GuestMount>,
    /// The program of podvisor's guest agent, if it is to be installed.
    pub agent: Option<Vec<u8>>,
}

impl GuestSeed {
    /// Makes the documents, on a volume that can be written.
    ///
    /// # Errors
    ///
    /// All that is wrong with the seed, at once.
    pub fn volume(&self) -> Result<Volume, SeedErrors> {
        let mut errors = Vec::new();
        self.check(&mut errors);
        let user_data = self.user_data.parse(&mut errors);
        let meta_data = self.meta_data(&mut errors);
        let network = self.network(&mut errors);
        let (user_data, vendor_data) = self.configure(user_data);
        let label = self.label();
        let prefix = match self.form {
            Form::NoCloud => "",
            Form::ConfigDrive => "openstack/latest/",
        };
        let names = match self.form {
            Form::NoCloud => ["meta-data", "user-data", "network-config", "vendor-data"],
            Form::ConfigDrive => [
                "meta_data.json",
                "user_data",
                "network_data.json",
                "vendor_data.json",
            ],
        };
        let documents = [Some(meta_data), Some(user_data), network, vendor_data];
        let volume = || -> Result<Volume, FatError> {
            let mut volume = Volume::new(label)?;
            for (name, document) in names.iter().zip(documents) {
                if let Some(document) = document {
                    volume.add(&format!("{prefix}{name}"), document)?;
                }
            }
            if let Some(program) = &self.agent {
                volume.add(agent::FILE, program.clone())?;
            }
            Ok(volume)
        };
        let volume = volume().map_err(|error| errors.push(error.into()));
        match volume {
            Ok(volume) if errors.is_empty() => Ok(volume),
            _ => Err(SeedErrors(errors)),
        }
    }

    /// The volume's label.
    fn label(&self) -> &'static str {
        match self.form {
            // cloud-init knows it in both cases; Ignition looks for `config-2` alone.
            Form::NoCloud => "CIDATA",
            Form::ConfigDrive => "config-2",
        }
    }

    fn check(&self, errors: &mut Vec<SeedError>) {
        let names = [
            (&self.instance_id, "instance"),
            (&self.host_name, "host name"),
        ];
        for (name, what) in names {
            let is_name = (1..=MAX_NAME).contains(&name.len()) && !name.contains(char::is_control);
            if !is_name {
                errors.push(SeedError::Name(name.clone(), what));
            }
        }
        for key in &self.ssh_keys {
            if let Err(reason) = keys::check(key) {
                let shown = key.chars().take(40).collect();
                errors.push(SeedError::Key(shown, reason));
            }
        }
        let paths = (self.files.iter().map(|file| &file.path))
            .chain(self.devices.iter().map(|link| &link.path))
            .chain(self.mounts.iter().map(|mount| &mount.path));
        for path in paths {
            if let Err(reason) = check_path(path) {
                errors.push(SeedError::Path(path.clone(), reason));
            }
        }
        for file in self.files.iter().filter(|file| file.mode > 0o7777) {
            errors.push(SeedError::Mode(file.path.clone(), file.mode));
        }
        let sources = (self
            .devices
            .iter()
            .map(|link| (link.serial.as_str(), MAX_SERIAL)))
        .chain(self.mounts.iter().map(GuestMount::name));
        for (name, most) in sources {
            if !scripts::is_name(name, most) {
                errors.push(SeedError::Source(name.to_owned()));
            }
        }
        for (name, value) in &self.environment {
            let is_name = !name.is_empty() && !name.contains(['=', '\0', '\n', '\r']);
            if !is_name || value.contains(['\0', '\n', '\r']) {
                errors.push(SeedError::Variable(name.clone()));
            }
        }
        for (count, what) in [
            (self.ssh_keys.len(), "SSH keys"),
            (self.files.len(), "files"),
            (self.environment.len(), "environment variables"),
            (self.devices.len(), "disks"),
            (self.mounts.len(), "mounts"),
        ] {
            if count > MAX_ENTRIES {
                errors.push(SeedError::TooMany(count, what));
            }
        }
    }

    fn meta_data(&self, errors: &mut Vec<SeedError>) -> Vec<u8> {
        let mut own = Map::new();
        let mut put = |key: &str, value: Value| own.insert(key.to_owned(), value);
        put("instance-id", json!(self.instance_id));
        put("local-hostname", json!(self.host_name));
        if self.form == Form::ConfigDrive {
            put("uuid", json!(self.instance_id));
            put("hostname", json!(self.host_name));
        }
        if !self.ssh_keys.is_empty() {
            put("public-keys", json!(self.ssh_keys));
            if self.form == Form::ConfigDrive {
                // The name that OpenStack has for them.
                let keys = self.ssh_keys.iter().enumerate();
                let keys = keys.map(|(number, key)| (format!("key-{number}"), json!(key)));
                put("public_keys", Value::Object(keys.collect()));
            }
        }
        let mut node = Node::from(Value::Object(own));
        if let Some(text) = &self.meta_data {
            node = overlay(node, user_data::map(text, "the meta-data", errors));
        }
        match self.form {
            Form::NoCloud => node.write().into_bytes(),
            Form::ConfigDrive => json_bytes(&node.to_json()),
        }
    }

    fn network(&self, errors: &mut Vec<SeedError>) -> Option<Vec<u8>> {
        let value = match (&self.network, self.form) {
            (NetworkConfig::None, _) => return None,
            (NetworkConfig::Version1(network), Form::NoCloud) => network.version_1(),
            (NetworkConfig::Version2(network), Form::NoCloud) => network.version_2(),
            (
                NetworkConfig::Version1(network) | NetworkConfig::Version2(network),
                Form::ConfigDrive,
            ) => network.network_data(),
            (NetworkConfig::Document(text), Form::NoCloud) => {
                user_data::map(text, "the network's document", errors);
                return Some(text.clone().into_bytes());
            }
            (NetworkConfig::Document(text), Form::ConfigDrive) => {
                if let Err(error) = serde_json::from_str::<Map<String, Value>>(text) {
                    errors.push(SeedError::NetworkJson(error.to_string()));
                }
                return Some(text.clone().into_bytes());
            }
        };
        Some(json_bytes(&value))
    }

    /// Returns the user-data, and the vendor-data with what cannot be put into it.
    fn configure(&self, user_data: Parsed) -> (Vec<u8>, Option<Vec<u8>>) {
        let own = self.own_config();
        match user_data {
            Parsed::Config(mut config, document) => {
                let mut is_rewritten = config.clone();
                scripts::rewrite(&mut is_rewritten, &self.devices);
                match document {
                    // A document to which nothing is added stays as it is, to its comments.
                    Some(document) if own.is_empty() && is_rewritten == config => {
                        (document, self.vendor_data(&Node::map([])))
                    }
                    _ => {
                        config = is_rewritten.merge(own);
                        (config_bytes(&config), self.vendor_data(&Node::map([])))
                    }
                }
            }
            Parsed::Script(script) => {
                let script = scripts::inject(&script, &self.devices, &self.mounts);
                (script.into_bytes(), self.vendor_data(&own))
            }
            Parsed::Verbatim(bytes) => (bytes, self.vendor_data(&own)),
        }
    }

    /// What is made of the seed besides the user's own configuration.
    fn own_config(&self) -> Node {
        let mut files = self.files.clone();
        files.extend(scripts::files(&self.devices, &self.mounts));
        if !self.environment.is_empty() {
            let lines = self.environment.iter();
            let lines = lines.map(|(name, value)| format!("{name}={value}\n"));
            files.push(GuestFile::new(ENVIRONMENT, lines.collect(), 0o644));
        }
        let files: Vec<Node> = files.iter().map(GuestFile::entry).collect();
        let mounts = scripts::entries(&self.mounts);
        let parts = [("write_files", files), ("mounts", mounts)];
        let parts = parts.into_iter().filter(|(_, list)| !list.is_empty());
        Node::map(parts.map(|(key, list)| (key, Node::List(list))))
    }

    fn vendor_data(&self, own: &Node) -> Option<Vec<u8>> {
        let config = (!own.is_empty()).then(|| config_bytes(own));
        let data = match (&self.agent, config) {
            (None, None) => return None,
            (None, Some(config)) => config,
            (Some(_), config) => agent::vendor_data(self.label(), config.as_deref()),
        };
        Some(match self.form {
            Form::NoCloud => data,
            Form::ConfigDrive => json_bytes(&json!({"cloud-init": String::from_utf8_lossy(&data)})),
        })
    }
}

/// Puts the keys of `over` into `node`, whole.
fn overlay(node: Node, over: Node) -> Node {
    let (Node::Map(mut map), Node::Map(over)) = (node, over) else {
        return Node::Map(Vec::new());
    };
    map.retain(|(key, _)| !over.iter().any(|(other, _)| other.is_same(key)));
    map.extend(over);
    Node::Map(map)
}

fn config_bytes(config: &Node) -> Vec<u8> {
    match config.is_empty() {
        true => format!("{HEADER}\n").into_bytes(),
        false => format!("{HEADER}\n{}", config.write()).into_bytes(),
    }
}

/// JSON in which each reader of YAML finds the same.
fn json_bytes(value: &Value) -> Vec<u8> {
    format!("{value:#}\n").into_bytes()
}

#[cfg(test)]
mod tests;
