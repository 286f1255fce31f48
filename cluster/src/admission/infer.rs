//! Which instance type and preference a VM has whose author names a volume for them.
//!
//! The names are in labels of what the volume is, or is a copy of: a claim, a DataVolume, a
//! DataSource. They are written into the VM when it is made, in place of the volume's name.

use podvisor_cluster_types::{
    Causes, FieldPath,
    datavolume::{DataSourceSpec, DataVolumeSpec, ForeignSource, SourceKind},
    vm::{Matcher, VmSpec},
};
use serde_json::{Value, json};

use super::{Request, Response, copies, lookup::Lookup, lookup::part};

/// The fields that may name a volume, and the labels that are looked for: name and kind.
const FIELDS: [(&str, [&str; 2]); 2] = [
    (
        "instancetype",
        [
            "instancetype.kubevirt.io/default-instancetype",
            "instancetype.kubevirt.io/default-instancetype-kind",
        ],
    ),
    (
        "preference",
        [
            "instancetype.kubevirt.io/default-preference",
            "instancetype.kubevirt.io/default-preference-kind",
        ],
    ),
];

/// With this policy a volume that says nothing is as if it had not been named.
const IGNORE: &str = "Ignore";
const POLICIES: [&str; 2] = [IGNORE, "Reject"];

/// Why nothing is inferred.
enum Fault {
    /// What the volume is says nothing.
    Nothing(String),
    /// The API server cannot be asked.
    Request(kube::Error),
}

impl From<kube::Error> for Fault {
    fn from(error: kube::Error) -> Self {
        Self::Request(error)
    }
}

fn nothing<T>(why: impl Into<String>) -> Result<T, Fault> {
    Err(Fault::Nothing(why.into()))
}

/// The VM with names in place of volumes; `None` if it names no volume.
pub(super) async fn infer(
    request: &Request,
    lookup: &impl Lookup,
) -> Result<Option<Value>, Response> {
    let is_asked = request.kind.kind == "VirtualMachine"
        && request.sub_resource.is_none()
        && matches!(request.operation.as_str(), "CREATE" | "UPDATE")
        && !request.is_going();
    if !is_asked {
        return Ok(None);
    }
    // What cannot be read is refused with all causes by those who judge it.
    let Ok(spec) = part::<VmSpec>(&request.object, "spec") else {
        return Ok(None);
    };
    let mut object = None;
    for (field, labels) in FIELDS {
        let matcher = match field {
            "instancetype" => &spec.instancetype,
            _ => &spec.preference,
        };
        let named = matcher.as_ref().and_then(|matcher| {
            let volume = matcher.infer_from_volume.as_deref();
            let volume = volume.filter(|volume| !volume.is_empty())?;
            Some((matcher, volume))
        });
        let Some((matcher, volume)) = named else {
            continue;
        };
        let path = FieldPath::new("spec").child(field);
        validate(matcher, &path)?;
        let is_ignored = matcher.infer_from_volume_failure_policy.as_deref() == Some(IGNORE);
        let search = Search {
            namespace: &request.namespace,
            spec: &spec,
            labels,
            lookup,
        };
        let replacement = match search.of_volume(volume).await {
            Ok(found) => Some(found),
            Err(Fault::Nothing(_)) if is_ignored => None,
            Err(Fault::Nothing(why)) => {
                let mut causes = Causes::default();
                causes.invalid(&path.child("inferFromVolume"), why);
                return Err(Response::Invalid(causes.into_vec()));
            }
            Err(Fault::Request(error)) => {
                tracing::error!(%error, "failed to look up what a VM's volume is");
                return Err(Response::Refused {
                    code: 500,
                    reason: "InternalError",
                    message: "the volume's labels cannot be looked up: try again".to_owned(),
                });
            }
        };
        let object = object.get_or_insert_with(|| request.object.clone());
        replace(object, field, replacement, is_ignored);
    }
    Ok(object)
}

fn validate(matcher: &Matcher, path: &FieldPath) -> Result<(), Response> {
    let mut causes = Causes::default();
    if matcher.name.as_ref().is_some_and(|name| !name.is_empty()) {
        causes.invalid(
            &path.child("name"),
            "is given, and a volume to infer it from as well",
        );
    }
    if matcher.kind.as_ref().is_some_and(|kind| !kind.is_empty()) {
        causes.invalid(
            &path.child("kind"),
            "is given, and a volume to infer it from as well",
        );
    }
    if let Some(policy) = &matcher.infer_from_volume_failure_policy
        && !policy.is_empty()
    {
        causes.one_of(
            &path.child("inferFromVolumeFailurePolicy"),
            policy,
            &POLICIES,
        );
    }
    let causes = causes.into_vec();
    if causes.is_empty() {
        return Ok(());
    }
    Err(Response::Invalid(causes))
}

fn replace(object: &mut Value, field: &str, found: Option<[String; 2]>, is_ignored: bool) {
    let Some(spec) = object.get_mut("spec").and_then(Value::as_object_mut) else {
        return;
    };
    let Some([name, kind]) = found else {
        spec.remove(field);
        return;
    };
    let mut matcher = json!({ "name": name });
    if !kind.is_empty() {
        matcher["kind"] = kind.into();
    }
    spec.insert(field.to_owned(), matcher);
    // A client that does not know whether there is an instance type gives memory as well.
    let domain = spec
        .get_mut("template")
        .map(|template| &mut template["spec"]["domain"]);
    if is_ignored
        && field == "instancetype"
        && let Some(domain) = domain.and_then(Value::as_object_mut)
    {
        domain.remove("memory");
    }
}

/// A search for labels.
struct Search<'a, L> {
    namespace: &'a str,
    spec: &'a VmSpec,
    labels: [&'static str; 2],
    lookup: &'a L,
}

impl<L: Lookup> Search<'_, L> {
    /// Name and kind, by a volume of the VM.
    async fn of_volume(&self, name: &str) -> Result<[String; 2], Fault> {
        let mut volumes = self.spec.template.iter().flat_map(|of| &of.spec.volumes);
        let Some(volume) = volumes.find(|volume| volume.name == name) else {
            return nothing("must be the name of one of the VM's volumes");
        };
        if let Some(claim) = &volume.persistent_volume_claim {
            return self.of_claim(self.namespace, &claim.claim_name).await;
        }
        let Some(volume) = &volume.data_volume else {
            return nothing("must be a volume persistentVolumeClaim or dataVolume");
        };
        let mut templates = self.spec.data_volume_templates.iter();
        let is_its = |name: &str| name == volume.name;
        let template = templates.find(|template| {
            let metadata = template.metadata.as_ref();
            metadata
                .and_then(|metadata| metadata.name.as_deref())
                .is_some_and(is_its)
        });
        if let Some(template) = template {
            let spec = template.spec.clone().unwrap_or_default();
            return self.of_specification(spec).await;
        }
        let stored = self
            .lookup
            .source("DataVolume", self.namespace, &volume.name)
            .await?;
        let Some(stored) = stored else {
            // It was deleted when it was done.
            return self.of_claim(self.namespace, &volume.name).await;
        };
        match self.labelled(&stored) {
            Some(found) => Ok(found),
            None => self.of_specification(stored["spec"].clone()).await,
        }
    }

    /// By the specification of a DataVolume: what it is a copy of.
    async fn of_specification(&self, spec: Value) -> Result<[String; 2], Fault> {
        let spec: DataVolumeSpec = serde_json::from_value(spec).unwrap_or_default();
        let in_own = |namespace: &Option<String>| {
            let given = namespace.as_deref().filter(|text| !text.is_empty());
            given.unwrap_or(self.namespace).to_owned()
        };
        if let Some(claim) = spec.source.as_ref().and_then(|source| source.pvc.as_ref()) {
            return self.of_claim(&in_own(&claim.namespace), &claim.name).await;
        }
        let Some(source) = spec.source_ref.filter(|source| source.kind == "DataSource") else {
            return nothing("must be a copy of a claim, or of what a DataSource names");
        };
        let namespace = in_own(&source.namespace);
        let stored = self
            .object(SourceKind::DataSource, &namespace, &source.name)
            .await?;
        let Some(stored) = stored else {
            return nothing(format!(
                "is of a DataSource {} that does not exist",
                source.name
            ));
        };
        if let Some(found) = self.labelled(&stored) {
            return Ok(found);
        }
        let named: DataSourceSpec =
            serde_json::from_value(stored["spec"].clone()).unwrap_or_default();
        match named.source.and_then(|source| source.pvc) {
            Some(claim) if claim.is_in(&namespace) => self.of_claim(&namespace, &claim.name).await,
            _ => nothing(format!(
                "is of the DataSource {}, which has no {}",
                source.name, self.labels[0]
            )),
        }
    }

    async fn of_claim(&self, namespace: &str, name: &str) -> Result<[String; 2], Fault> {
        let Some(claim) = self.object(SourceKind::Claim, namespace, name).await? else {
            return nothing(format!("is of a claim {name} that does not exist"));
        };
        let found = self.labelled(&claim);
        found.map_or_else(
            || {
                nothing(format!(
                    "is of the claim {name}, which has no label {}",
                    self.labels[0]
                ))
            },
            Ok,
        )
    }

    /// An object; what is in another namespace only for who may copy it.
    async fn object(
        &self,
        kind: SourceKind,
        namespace: &str,
        name: &str,
    ) -> Result<Option<Value>, Fault> {
        if namespace != self.namespace {
            let source = ForeignSource {
                namespace: namespace.to_owned(),
                kind,
                name: name.to_owned(),
            };
            let user = copies::account(self.namespace, self.spec.account());
            if let Some(refusal) = copies::refusal(&user, &source, self.lookup).await? {
                return nothing(format!("cannot be read: {refusal}"));
            }
        }
        Ok(self.lookup.source(kind.name(), namespace, name).await?)
    }

    fn labelled(&self, object: &Value) -> Option<[String; 2]> {
        let labels = object.pointer("/metadata/labels")?;
        let [name, kind] = self.labels.map(|label| labels[label].as_str());
        Some([name?.to_owned(), kind.unwrap_or_default().to_owned()])
    }
}
