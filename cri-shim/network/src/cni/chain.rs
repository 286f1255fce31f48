//! The plugins of a list, run one after the other (CNI specification 1.1, "Lifecycle").

use std::env;
use std::ffi::OsString;
use std::path::PathBuf;
use std::pin::pin;
use std::time::Duration;

use podvisor_host::blocking::in_place;
use serde_json::{Map, Value};

use super::cache::Cached;
use super::config::{List, Plugin};
use super::error::CniError;
use super::input::Input;
use super::plugin::{self, Invocation};
use super::pod::{INTERFACE, PORT_MAPPINGS};
use super::result::CniResult;

/// How much longer a plugin may take for each port of the host that it forwards, and for all.
const PORT_TIME: Duration = Duration::from_secs(2);
const PORTS_TIME: Duration = Duration::from_secs(30 * 60);

/// Plugins, the pod and the present record of its network.
#[derive(Debug)]
pub(super) struct Chain<'a> {
    cached: &'a Cached,
    /// The file of the pod's [`Input`].
    input: PathBuf,
    plugin_dirs: &'a [PathBuf],
    limit: Duration,
    path: String,
}

impl<'a> Chain<'a> {
    pub(super) fn new(
        cached: &'a Cached,
        input: PathBuf,
        plugin_dirs: &'a [PathBuf],
        limit: Duration,
    ) -> Result<Self, CniError> {
        Ok(Self {
            cached,
            input,
            plugin_dirs,
            limit,
            path: search_path(plugin_dirs),
        })
    }

    /// Prepares [`Self::add`]: looks for the plugins' programs, and takes the pod's input, with
    /// blocks of the disk for each plugin's configuration. If this fails, no plugin has run, and
    /// there is nothing to undo.
    pub(super) async fn prepare(&self) -> Result<Input, CniError> {
        let mut longest = 0;
        for plugin in &self.cached.list.plugins {
            longest = longest.max(self.invocation(plugin, "ADD", None)?.config.len());
        }
        let mut input = self.input().await?;
        let reserved = in_place(|| input.reserve(longest));
        reserved.map_err(CniError::io("write", &self.input))?;
        Ok(input)
    }

    /// Runs ADD; the last plugin's result is the network's. `note` gets each earlier result before
    /// the next plugin runs, for the DEL that undoes that plugin: plugins such as `firewall` know
    /// what they did only from the previous result.
    pub(super) async fn add(
        &self,
        mut input: Input,
        mut note: impl FnMut(&Value) -> Result<(), CniError>,
    ) -> Result<(Value, CniResult), CniError> {
        let mut previous = None;
        for plugin in &self.cached.list.plugins {
            if let Some(answer) = &previous {
                note(answer)?;
            }
            let adding = self.invocation(plugin, "ADD", previous.as_ref())?;
            let printed = adding.run(&mut input).await?;
            let answer = serde_json::from_slice::<Value>(&printed);
            let mut answer = answer.map_err(|error| CniError::InvalidResult {
                name: plugin.kind.clone(),
                reason: format!("not JSON: {error}"),
            })?;
            let Some(fields) = answer.as_object_mut() else {
                return Err(CniError::InvalidResult {
                    name: plugin.kind.clone(),
                    reason: "not a JSON object".to_owned(),
                });
            };
            // Some plugins leave it out. It is the configuration's then, as other runtimes have it.
            let version = fields.entry("cniVersion").or_insert(Value::Null);
            if version.is_null() || version == "" {
                *version = self.cached.list.version.clone().into();
            }
            previous = Some(answer);
        }
        let raw = previous.unwrap_or(Value::Null);
        let result = CniResult::parse(&raw, INTERFACE)?;
        Ok((raw, result))
    }

    /// Runs CHECK until `end` at most; it is skipped if the list disables it or its version lacks
    /// it.
    pub(super) async fn check(&self, end: impl Future<Output = ()>) -> Result<(), CniError> {
        let list = &self.cached.list;
        if list.disable_check || list.version.starts_with("0.3.") {
            return Ok(());
        }
        let mut end = pin!(end);
        let mut input = tokio::select! {
            input = self.input() => input?,
            () = end.as_mut() => return Err(CniError::Unchecked),
        };
        for plugin in &list.plugins {
            let check = self.invocation(plugin, "CHECK", self.cached.result.as_ref())?;
            check.run_until(&mut input, end.as_mut()).await?;
        }
        Ok(())
    }

    /// Runs DEL in reverse order, even if an ADD failed in the middle. All plugins are run; the
    /// first error is returned.
    pub(super) async fn del(&self) -> Result<(), CniError> {
        let mut input = self.input().await?;
        let mut first = Ok(());
        for plugin in self.cached.list.plugins.iter().rev() {
            // Before version 0.4, DEL does not pass the previous result to plugins.
            let previous = match self.cached.list.version.starts_with("0.3.") {
                true => None,
                false => self.cached.result.as_ref(),
            };
            let done = match self.invocation(plugin, "DEL", previous) {
                Ok(deletion) => deletion.run(&mut input).await.map(drop),
                Err(error) => Err(error),
            };
            first = first.and(done);
        }
        first
    }

    /// Waits until no plugin of an earlier chain works on the pod any more.
    async fn input(&self) -> Result<Input, CniError> {
        Input::take(&self.input, self.limit).await
    }

    fn invocation<'p>(
        &self,
        plugin: &'p Plugin,
        command: &'static str,
        previous: Option<&Value>,
    ) -> Result<Invocation<'p>, CniError> {
        let config = Value::Object(self.config(plugin, previous));
        let pod = &self.cached.pod;
        let arguments = format!(
            "IgnoreUnknown=1;K8S_POD_NAMESPACE={};K8S_POD_NAME={};\
             K8S_POD_INFRA_CONTAINER_ID={};K8S_POD_UID={}",
            pod.namespace, pod.name, pod.id, pod.uid
        );
        let netns = self.cached.netns.to_string_lossy().into_owned();
        Ok(Invocation {
            name: &plugin.kind,
            program: plugin::find(self.plugin_dirs, &plugin.kind)?,
            command,
            variables: vec![
                ("CNI_CONTAINERID", pod.id.clone()),
                ("CNI_NETNS", netns),
                ("CNI_IFNAME", INTERFACE.to_owned()),
                ("CNI_ARGS", arguments),
                ("CNI_PATH", self.path.clone()),
            ],
            limit: self.limit.saturating_add(self.time_for_ports(plugin)),
            config: config.to_string().into_bytes(),
        })
    }

    /// How much longer a plugin may take because it forwards ports of the host: portmap starts
    /// `iptables` up to a dozen times for each, and each waits for a lock of the whole host.
    fn time_for_ports(&self, plugin: &Plugin) -> Duration {
        let mappings = self.cached.capabilities.get(PORT_MAPPINGS);
        let mappings = mappings.filter(|_| plugin.wants(PORT_MAPPINGS));
        let count = mappings.and_then(Value::as_array).map_or(0, Vec::len);
        let more = PORT_TIME.saturating_mul(u32::try_from(count).unwrap_or(u32::MAX));
        more.min(PORTS_TIME)
    }

    /// The plugin's configuration with the additions that the specification requires of the
    /// runtime.
    fn config(&self, plugin: &Plugin, previous: Option<&Value>) -> Map<String, Value> {
        let mut config = config_in(&self.cached.list, plugin);
        let wanted = self.cached.capabilities.iter();
        let wanted = wanted.filter(|(name, _)| plugin.wants(name));
        let runtime: Map<String, Value> = wanted.map(|(n, v)| (n.clone(), v.clone())).collect();
        if !runtime.is_empty() {
            config.insert("runtimeConfig".to_owned(), Value::Object(runtime));
        }
        if let Some(previous) = previous {
            config.insert("prevResult".to_owned(), previous.clone());
        }
        config
    }
}

/// Runs STATUS: whether the plugins of a list are ready for pods. Each plugin has `limit` to
/// answer.
pub(super) async fn status(
    list: &List,
    plugin_dirs: &[PathBuf],
    limit: Duration,
) -> Result<(), CniError> {
    for plugin in &list.plugins {
        let name = &plugin.kind;
        let status = Invocation {
            name,
            program: plugin::find(plugin_dirs, name)?,
            command: "STATUS",
            // There is no pod to describe.
            variables: vec![("CNI_PATH", search_path(plugin_dirs))],
            config: Value::Object(config_in(list, plugin))
                .to_string()
                .into_bytes(),
            limit,
        };
        let done = status.run(&mut Input::of_nobody()?).await;
        done.map_err(|error| match error {
            CniError::Failed { name, message, .. } => CniError::NotReady { name, message },
            other => other,
        })?;
    }
    Ok(())
}

/// The value of `CNI_PATH`.
fn search_path(plugin_dirs: &[PathBuf]) -> String {
    let path = env::join_paths(plugin_dirs).unwrap_or_else(|_| OsString::new());
    path.to_string_lossy().into_owned()
}

/// A plugin's configuration with the fields that it gets from its list.
fn config_in(list: &List, plugin: &Plugin) -> Map<String, Value> {
    let mut config = plugin.config.clone();
    config.insert("cniVersion".to_owned(), list.version.clone().into());
    config.insert("name".to_owned(), list.name.clone().into());
    config
}
