//! Instance types and preferences of VMs: found at the API server, and applied to templates.
//!
//! They are read at each start of a VM, and for whoever wants to see the VM with them. What is
//! read is not kept: a changed instance type reaches a VM at its next start.

use std::{collections::BTreeMap, future::Future};

use kube::{
    Api, Client,
    core::{ApiResource, DynamicObject, GroupVersionKind},
};
use podvisor_cluster_types::{
    Cause, Causes, FieldPath,
    instancetype::{GROUP, INSTANCETYPES, InstancetypeSpec, PREFERENCES, PreferenceSpec, apply},
    vm::Matcher,
    vmi::VmiSpec,
};
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::typed;

/// The version that is read.
pub(crate) const VERSION: &str = "v1beta1";

/// Annotations of an instance: what its VM names, by the kinds in [`INSTANCETYPES`] and
/// [`PREFERENCES`].
const NAMES: [[&str; 2]; 2] = [
    [
        "kubevirt.io/instancetype-name",
        "kubevirt.io/cluster-instancetype-name",
    ],
    [
        "kubevirt.io/preference-name",
        "kubevirt.io/cluster-preference-name",
    ],
];

/// Where specifications of instance types and preferences are found.
pub trait Specs: Sync {
    /// The specification of an object; without a namespace, one of the cluster.
    fn spec_of(
        &self,
        kind: &'static str,
        namespace: Option<&str>,
        name: &str,
    ) -> impl Future<Output = Result<Option<Value>, kube::Error>> + Send;
}

impl Specs for Client {
    async fn spec_of(
        &self,
        kind: &'static str,
        namespace: Option<&str>,
        name: &str,
    ) -> Result<Option<Value>, kube::Error> {
        let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(GROUP, VERSION, kind));
        let api: Api<DynamicObject> = match namespace {
            Some(namespace) => Api::namespaced_with(self.clone(), namespace, &resource),
            None => Api::all_with(self.clone(), &resource),
        };
        let found = api.get_opt(name).await?;
        Ok(found.map(|object| object.data.get("spec").cloned().unwrap_or_default()))
    }
}

/// What a VM names.
#[derive(Debug, Default)]
pub(crate) struct Found {
    instancetype: Option<InstancetypeSpec>,
    preference: Option<PreferenceSpec>,
    names: BTreeMap<String, String>,
}

/// Why a VM is not expanded.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ExpandError {
    /// What it names does not exist, or does not fit; with all causes.
    #[error("{}", words(.0))]
    Refused(Vec<Cause>),
    /// The API server cannot be asked.
    #[error("failed to read the instance type or the preference")]
    Request(#[from] kube::Error),
}

fn words(causes: &[Cause]) -> String {
    // Each begins with its field's path.
    let words = causes.iter().map(|cause| cause.message.as_str());
    words.collect::<Vec<_>>().join(", ")
}

/// Finds what a VM names, below `path` (`spec`).
pub(crate) async fn find(
    specs: &impl Specs,
    namespace: &str,
    instancetype: Option<&Matcher>,
    preference: Option<&Matcher>,
    path: &FieldPath,
) -> Result<Found, ExpandError> {
    let mut found = Found::default();
    if let Some(matcher) = instancetype {
        let path = path.child("instancetype");
        let (spec, is_of_cluster) = read(specs, namespace, matcher, INSTANCETYPES, &path).await?;
        found.instancetype = Some(spec);
        found.name(0, is_of_cluster, matcher);
    }
    if let Some(matcher) = preference {
        let path = path.child("preference");
        let (spec, is_of_cluster) = read(specs, namespace, matcher, PREFERENCES, &path).await?;
        found.preference = Some(spec);
        found.name(1, is_of_cluster, matcher);
    }
    Ok(found)
}

async fn read<T: DeserializeOwned>(
    specs: &impl Specs,
    namespace: &str,
    matcher: &Matcher,
    [of_namespace, of_cluster]: [&'static str; 2],
    path: &FieldPath,
) -> Result<(T, bool), ExpandError> {
    let refused = |field: &str, message: String| {
        let mut causes = Causes::default();
        causes.invalid(&path.child(field), message);
        ExpandError::Refused(causes.into_vec())
    };
    let name = matcher.name.as_deref().unwrap_or_default();
    let given = matcher.kind.as_deref().unwrap_or_default();
    // KubeVirt's clients write plurals, too.
    let singular = given.strip_suffix('s').unwrap_or(given);
    let is = |kind: &str| singular.eq_ignore_ascii_case(kind);
    let (kind, namespace) = match given {
        "" => (of_cluster, None),
        _ if is(of_cluster) => (of_cluster, None),
        _ if is(of_namespace) => (of_namespace, Some(namespace)),
        _ => {
            let message = format!("must be {of_namespace} or {of_cluster}");
            return Err(refused("kind", message));
        }
    };
    let spec = specs.spec_of(kind, namespace, name).await?;
    let shown = podvisor_cluster_types::cause::shown(name);
    let spec =
        spec.ok_or_else(|| refused("name", format!("is {shown}: there is no such {kind}")))?;
    let spec = serde_json::from_value(spec)
        .map_err(|error| refused("name", format!("is {shown}, which cannot be read: {error}")))?;
    Ok((spec, namespace.is_none()))
}

impl Found {
    fn name(&mut self, which: usize, is_of_cluster: bool, matcher: &Matcher) {
        let names = NAMES
            .get(which)
            .and_then(|of| of.get(usize::from(is_of_cluster)));
        if let (Some(annotation), Some(name)) = (names, &matcher.name) {
            self.names.insert((*annotation).to_owned(), name.clone());
        }
    }

    /// Applies it to a specification; every conflict below `path`.
    pub(crate) fn apply(&self, spec: &mut VmiSpec, path: &FieldPath) -> Vec<Cause> {
        apply(
            spec,
            self.instancetype.as_ref(),
            self.preference.as_ref(),
            path,
        )
    }

    /// Applies it to a specification in JSON, of which nothing else is changed.
    pub(crate) fn apply_to(&self, spec: &mut Value, path: &FieldPath) -> Result<(), ExpandError> {
        let mut causes = Vec::new();
        let changed = typed::change(spec, |spec: &mut VmiSpec| causes = self.apply(spec, path));
        if let Err(error) = changed {
            let mut unreadable = Causes::default();
            unreadable.invalid(path, format_args!("cannot be read: {error}"));
            causes = unreadable.into_vec();
        }
        if causes.is_empty() {
            Ok(())
        } else {
            Err(ExpandError::Refused(causes))
        }
    }

    /// Annotations of an instance.
    pub(crate) fn annotations(&self) -> BTreeMap<String, String> {
        let of_type = self.instancetype.iter().flat_map(|of| &of.annotations);
        let of_preference = self.preference.iter().flat_map(|of| &of.annotations);
        let given = of_preference.chain(of_type).chain(&self.names);
        given
            .map(|(name, value)| (name.clone(), value.clone()))
            .collect()
    }
}
