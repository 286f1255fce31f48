//! The VirtualMachine: a VMI that is kept, started and stopped.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use crate::{
    Cause, Causes, ClusterConfig, ClusterDefaults, FieldPath,
    cause::shown,
    datavolume::{DataVolumeSpec, ForeignSource},
    memory_dump::MemoryDumpRequest,
    meta::Meta,
    vmi::{Condition, VmiSpec},
};

/// The words of `runStrategy`.
const RUN_STRATEGIES: [&str; 5] = ["Always", "Halted", "Manual", "RerunOnFailure", "Once"];

object! {
    /// What a VM should be (`spec`).
    pub struct VmSpec {
        /// Whether it runs; excludes `runStrategy`.
        pub running: Option<bool>,
        /// When it runs.
        pub run_strategy: Option<String>,
        /// The VMI that is made of it.
        pub template: Option<VmiTemplate>,
        /// DataVolumes that belong to it.
        pub data_volume_templates: Vec<DataVolumeTemplate>,
        /// The instance type that sets CPUs and memory.
        pub instancetype: Option<Matcher>,
        /// The preference that fills in what is left out.
        pub preference: Option<Matcher>,
        /// How changes reach the running VMI.
        pub update_volumes_strategy: Option<String>,
    }

    /// A VMI to be made.
    pub struct VmiTemplate {
        /// Its labels and annotations.
        pub metadata: Option<TemplateMeta>,
        /// Its specification.
        pub spec: VmiSpec,
    }

    /// Labels and annotations of what is made from a template.
    pub struct TemplateMeta {
        /// Labels.
        pub labels: BTreeMap<String, String>,
        /// Annotations.
        pub annotations: BTreeMap<String, String>,
        /// What older clients write here, and nobody reads.
        pub creation_timestamp: Option<String>,
        /// Ignored: the VMI has the VM's name.
        pub name: Option<String>,
        /// Ignored: the VMI is in the VM's namespace.
        pub namespace: Option<String>,
    }

    /// A DataVolume to be made.
    pub struct DataVolumeTemplate {
        /// Its kind, which may be given.
        pub kind: Option<String>,
        /// Its version, which may be given.
        pub api_version: Option<String>,
        /// Name, labels and annotations.
        pub metadata: Option<TemplateMeta>,
        /// Its specification.
        pub spec: Option<Value>,
        /// Its status, which older clients write.
        pub status: Option<Value>,
    }

    /// A reference to an instance type or a preference.
    pub struct Matcher {
        /// Its name.
        pub name: Option<String>,
        /// Its kind.
        pub kind: Option<String>,
        /// The ControllerRevision that holds its copy.
        pub revision_name: Option<String>,
        /// The volume to read the name from.
        pub infer_from_volume: Option<String>,
        /// What happens where that volume names none.
        pub infer_from_volume_failure_policy: Option<String>,
    }

    /// What is reported of a VM (`status`).
    pub struct VmStatus {
        /// Its VMI exists.
        pub created: Option<bool>,
        /// Its VMI is ready.
        pub ready: Option<bool>,
        /// Its state, for people.
        pub printable_status: Option<String>,
        /// Conditions.
        pub conditions: Vec<Condition>,
        /// Starts and stops that were asked for.
        pub state_change_requests: Vec<StateChangeRequest>,
        /// Volumes that are to be plugged or unplugged.
        pub volume_requests: Vec<VolumeRequest>,
        /// Failures of its starts.
        pub start_failure: Option<StartFailure>,
        /// Name of the snapshot that is being taken.
        pub snapshot_in_progress: Option<String>,
        /// Name of the restore that is in progress.
        pub restore_in_progress: Option<String>,
        /// Generation that the controller has seen.
        pub observed_generation: Option<i64>,
        /// Generation that the controller should see.
        pub desired_generation: Option<i64>,
        /// The strategy that holds.
        pub run_strategy: Option<String>,
        /// Whether each volume can be snapshotted.
        pub volume_snapshot_statuses: Vec<Value>,
        /// What the memory dump is doing.
        pub memory_dump_request: Option<MemoryDumpRequest>,
    }

    /// A start or a stop that was asked for.
    pub struct StateChangeRequest {
        /// `Start` or `Stop`.
        pub action: String,
        /// Details, such as `paused`.
        pub data: BTreeMap<String, String>,
        /// The VMI that it is for.
        pub uid: Option<String>,
    }

    /// A volume to be plugged or unplugged.
    pub struct VolumeRequest {
        /// Plug it.
        pub add_volume_options: Option<AddVolumeOptions>,
        /// Unplug it.
        pub remove_volume_options: Option<RemoveVolumeOptions>,
    }

    /// A volume to be plugged.
    pub struct AddVolumeOptions {
        /// Its name.
        pub name: String,
        /// Its disk.
        pub disk: Option<crate::vmi::Disk>,
        /// Its source.
        pub volume_source: Option<HotplugSource>,
        /// Only checks.
        pub dry_run: Vec<String>,
    }

    /// What may be plugged.
    pub struct HotplugSource {
        /// A claim.
        pub persistent_volume_claim: Option<crate::vmi::ClaimSource>,
        /// A DataVolume.
        pub data_volume: Option<crate::vmi::DataVolumeSource>,
    }

    /// A volume to be unplugged.
    pub struct RemoveVolumeOptions {
        /// Its name.
        pub name: String,
        /// Only checks.
        pub dry_run: Vec<String>,
    }

    /// Failures of starts.
    pub struct StartFailure {
        /// How many in a row.
        pub consecutive_fail_count: Option<i32>,
        /// The VMI that failed last.
        #[serde(rename = "lastFailedVMIUID")]
        pub last_failed_vmi_uid: Option<String>,
        /// When the next try may begin.
        pub retry_after_timestamp: Option<String>,
    }
}

/// When a VM runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum RunStrategy {
    /// Always; it is started again whenever it ends.
    Always,
    /// Never.
    Halted,
    /// When a user says so.
    Manual,
    /// Started again when it failed.
    RerunOnFailure,
    /// Once.
    Once,
}

impl RunStrategy {
    /// The strategy of this name.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        Some(match name {
            "Always" => Self::Always,
            "Halted" => Self::Halted,
            "Manual" => Self::Manual,
            "RerunOnFailure" => Self::RerunOnFailure,
            "Once" => Self::Once,
            _ => return None,
        })
    }

    /// Its name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Always => "Always",
            Self::Halted => "Halted",
            Self::Manual => "Manual",
            Self::RerunOnFailure => "RerunOnFailure",
            Self::Once => "Once",
        }
    }
}

impl VmiTemplate {
    /// Adds every cause to refuse the metadata, below `path`: what is made of it is made by the
    /// system, which may set any.
    pub(crate) fn validate_meta(&self, path: &FieldPath, causes: &mut Causes) {
        if let Some(metadata) = &self.metadata {
            let meta = Meta {
                labels: metadata.labels.clone(),
                annotations: metadata.annotations.clone(),
                ..Default::default()
            };
            crate::vmi::validate_meta(&meta, path, causes);
        }
    }
}

impl VmSpec {
    /// The strategy that holds; `None` where the specification gives none or an unknown one.
    #[must_use]
    pub fn strategy(&self) -> Option<RunStrategy> {
        match (&self.run_strategy, self.running) {
            (Some(name), _) => RunStrategy::parse(name),
            (None, Some(true)) => Some(RunStrategy::Always),
            (None, Some(false)) => Some(RunStrategy::Halted),
            (None, None) => None,
        }
    }

    /// Fills in what is kept in the VM itself: all else is filled in when its VMI is made, so
    /// that a change of the cluster's defaults reaches VMs at their next start.
    pub fn apply_defaults(&mut self, _defaults: &ClusterDefaults, uuid: impl FnOnce() -> String) {
        let Some(template) = &mut self.template else {
            return;
        };
        let machine = template.spec.domain.machine.get_or_insert_default();
        if machine.kind.is_empty() {
            machine.kind = crate::config::MACHINE_TYPE.to_owned();
        }
        template
            .spec
            .architecture
            .get_or_insert_with(|| crate::config::ARCHITECTURE.to_owned());
        template.spec.set_firmware_uuid(uuid);
    }

    /// Every cause to refuse this specification, below `path` (`spec`).
    #[must_use]
    pub fn validate(
        &self,
        defaults: &ClusterDefaults,
        config: &ClusterConfig,
        path: &FieldPath,
    ) -> Vec<Cause> {
        let mut causes = Causes::default();
        self.validate_strategy(path, &mut causes);
        let Some(template) = &self.template else {
            causes.required(&path.child("template"), "is required");
            return causes.into_vec();
        };
        self.validate_data_volumes(template, path, &mut causes);
        for (name, matcher) in [
            ("instancetype", &self.instancetype),
            ("preference", &self.preference),
        ] {
            validate_matcher(matcher.as_ref(), &path.child(name), &mut causes);
        }
        template.validate_meta(&path.child("template.metadata"), &mut causes);
        let mut causes = causes.into_vec();
        // What they set is not known here: the VMI is validated with it.
        if self.instancetype.is_none() && self.preference.is_none() {
            let mut spec = template.spec.clone();
            spec.apply_defaults(defaults);
            causes.extend(spec.validate(config, &path.child("template.spec")));
        }
        causes
    }

    /// What the templates of DataVolumes copy from other namespaces than their own, with the index
    /// of each.
    #[must_use]
    pub fn foreign_sources(&self, namespace: &str) -> Vec<(usize, ForeignSource)> {
        let templates = self.data_volume_templates.iter().enumerate();
        let of = |(index, template): (usize, &DataVolumeTemplate)| {
            let spec = serde_json::from_value::<DataVolumeSpec>(template.spec.clone()?).ok()?;
            Some((index, spec.foreign_source(namespace)?))
        };
        templates.filter_map(of).collect()
    }

    /// The service account on whose behalf a machine's DataVolumes are made: that of a volume, or
    /// the account of pods that name none.
    #[must_use]
    pub fn account(&self) -> &str {
        let template = self.template.as_ref();
        let mut volumes = template
            .into_iter()
            .flat_map(|template| &template.spec.volumes);
        let account = volumes.find_map(|volume| volume.service_account.as_ref());
        let name = account.and_then(|account| account.service_account_name.as_deref());
        name.filter(|name| !name.is_empty()).unwrap_or("default")
    }

    /// Causes to refuse templates of DataVolumes whose sources cannot be used from a namespace,
    /// below `path` (`spec`).
    #[must_use]
    pub fn unusable_sources(&self, namespace: &str, path: &FieldPath) -> Vec<Cause> {
        let mut causes = Causes::default();
        for (index, template) in self.data_volume_templates.iter().enumerate() {
            let path = path.child("dataVolumeTemplates").index(index).child("spec");
            let spec = template.spec.clone().unwrap_or_default();
            if let Ok(spec) = serde_json::from_value::<DataVolumeSpec>(spec) {
                causes.extend(spec.validate_source_namespace(namespace, &path));
            }
        }
        causes.into_vec()
    }

    fn validate_strategy(&self, path: &FieldPath, causes: &mut Causes) {
        let running = path.child("running");
        match (self.running, &self.run_strategy) {
            (Some(_), Some(_)) => {
                causes.invalid(&running, "and runStrategy must not both be given");
            }
            (None, None) => causes.required(&running, "or runStrategy is required"),
            _ => {}
        }
        if let Some(strategy) = &self.run_strategy {
            causes.one_of(&path.child("runStrategy"), strategy, &RUN_STRATEGIES);
        }
    }

    fn validate_data_volumes(&self, template: &VmiTemplate, path: &FieldPath, causes: &mut Causes) {
        let used: BTreeSet<&str> = template
            .spec
            .volumes
            .iter()
            .filter_map(|volume| {
                let data = volume.data_volume.as_ref().map(|data| data.name.as_str());
                data.or_else(|| {
                    volume
                        .persistent_volume_claim
                        .as_ref()
                        .map(|claim| claim.claim_name.as_str())
                })
            })
            .collect();
        let mut names = BTreeSet::new();
        for (index, data_volume) in self.data_volume_templates.iter().enumerate() {
            let path = path.child("dataVolumeTemplates").index(index);
            let name = data_volume
                .metadata
                .as_ref()
                .and_then(|meta| meta.name.as_deref());
            let Some(name) = name.filter(|name| !name.is_empty()) else {
                causes.required(&path.child("metadata.name"), "is required");
                continue;
            };
            if !names.insert(name) {
                causes.duplicate(&path.child("metadata.name"), name);
            }
            if !used.contains(name) {
                let message = format!("is {}, but no volume uses it", shown(name));
                causes.invalid(&path, message);
            }
            data_volume.validate_spec(&path.child("spec"), causes);
        }
    }
}

impl DataVolumeTemplate {
    fn validate_spec(&self, path: &FieldPath, causes: &mut Causes) {
        let spec = self.spec.clone().unwrap_or_else(|| serde_json::json!({}));
        match serde_json::from_value::<DataVolumeSpec>(spec) {
            Ok(spec) => causes.extend(spec.validate(path)),
            Err(error) => causes.invalid(path, format_args!("cannot be read: {error}")),
        }
    }
}

fn validate_matcher(matcher: Option<&Matcher>, path: &FieldPath, causes: &mut Causes) {
    let Some(matcher) = matcher else { return };
    let given = |text: &Option<String>| text.as_ref().is_some_and(|text| !text.is_empty());
    if !given(&matcher.name) && !given(&matcher.infer_from_volume) {
        causes.required(&path.child("name"), "is required");
    }
    for (field, value, instead) in [
        (
            "inferFromVolume",
            &matcher.infer_from_volume,
            "give the name, which the webhook puts in its place when the VM is made",
        ),
        (
            "revisionName",
            &matcher.revision_name,
            "leave it out: the object is read at each start",
        ),
    ] {
        if given(value) {
            causes.not_supported(
                &path.child(field),
                format_args!("is not supported: {instead}"),
            );
        }
    }
}
