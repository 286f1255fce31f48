//! The rules of DataVolumes.

use super::{ClaimTemplate, DataVolumeSource, DataVolumeSpec, HttpSource, RegistrySource};
use crate::{
    Cause, Causes, FieldPath,
    cause::shown,
    names::{is_clean_absolute_path, is_dns_subdomain},
};

const ACCESS_MODES: [&str; 4] = [
    "ReadWriteOnce",
    "ReadOnlyMany",
    "ReadWriteMany",
    "ReadWriteOncePod",
];

/// Minimum size of a claim, in bytes.
const MIN_SIZE: u64 = 1 << 20;

/// Longer URLs are refused.
const MAX_URL: usize = 2048;

/// More headers than this are refused.
const MAX_HEADERS: usize = 64;

impl DataVolumeSpec {
    /// Every cause to refuse this specification, below `path` (`spec`).
    #[must_use]
    pub fn validate(&self, path: &FieldPath) -> Vec<Cause> {
        let mut causes = Causes::default();
        let claim = path.child("PVC");
        match (&self.pvc, &self.storage) {
            (Some(_), Some(_)) => causes.invalid(&claim, "and storage must not both be given"),
            (None, None) => causes.required(&claim, "or storage is required"),
            (Some(pvc), None) => {
                self.validate_claim(pvc, &claim, &mut causes);
                if pvc.access_modes.is_empty() {
                    causes.required(&claim.child("accessModes"), "must have one access mode");
                }
            }
            (None, Some(storage)) => {
                self.validate_claim(storage, &path.child("storage"), &mut causes);
            }
        }
        self.validate_source(path, &mut causes);
        let content = self.content_type.as_deref().unwrap_or_default();
        let of_content = path.child("contentType");
        match content {
            "" | "kubevirt" => {}
            "archive" => causes.not_supported(
                &of_content,
                "is \"archive\", which is not supported: volumes hold disks",
            ),
            other => causes.one_of(&of_content, other, &["kubevirt", "archive"]),
        }
        if !self.checkpoints.is_empty() || self.final_checkpoint == Some(true) {
            let field = path.child("checkpoints");
            causes.not_supported(&field, "are not supported: import the disk in one step");
        }
        for (name, value) in [
            ("priorityClassName", &self.priority_class_name),
            ("serviceAccountName", &self.service_account_name),
        ] {
            optional_name(value.as_deref(), &path.child(name), &mut causes);
        }
        causes.into_vec()
    }

    /// Every cause to refuse a change, below `path` (`spec`).
    #[must_use]
    pub fn validate_update(&self, old: &Self, path: &FieldPath) -> Vec<Cause> {
        let mut causes = Causes::default();
        if self != old {
            causes.forbidden(
                path,
                "cannot change: delete the DataVolume and create another",
            );
        }
        causes.into_vec()
    }

    fn validate_claim(&self, claim: &ClaimTemplate, path: &FieldPath, causes: &mut Causes) {
        let modes = path.child("accessModes");
        if claim.access_modes.len() > 1 {
            causes.invalid(&modes, "must have one access mode only");
        }
        for mode in &claim.access_modes {
            causes.one_of(&modes, mode, &ACCESS_MODES);
        }
        if let Some(mode) = claim.volume_mode.as_deref().filter(|mode| !mode.is_empty()) {
            let field = path.child("volumeMode");
            causes.one_of(&field, mode, &["Filesystem", "Block"]);
        }
        let size = path.child("resources.requests.size");
        match claim.request() {
            // It has the size of what it is a copy of.
            None if self.cloned_claim().is_some()
                || self.restored_snapshot().is_some()
                || self.source_ref.is_some() => {}
            None => causes.required(&size, "is required"),
            Some(request) => match request.amount() {
                Err(error) => {
                    let given = shown(request.as_str());
                    causes.invalid(&size, format_args!("is {given}, which {error}"));
                }
                Ok(amount) if amount.ceil() <= 0 => {
                    causes.invalid(&size, "must be greater than zero");
                }
                Ok(_) if request.bytes().is_some_and(|bytes| bytes < MIN_SIZE) => {
                    causes.invalid(&size, "must be at least 1Mi");
                }
                Ok(_) if self.claim_size().is_none() => causes.invalid(&size, "is too large"),
                Ok(_) => {}
            },
        }
        let class = path.child("storageClassName");
        let name = claim.storage_class_name.as_deref();
        optional_name(name.filter(|name| !name.is_empty()), &class, causes);
        let class = path.child("volumeAttributesClassName");
        let name = claim.volume_attributes_class_name.as_deref();
        optional_name(name.filter(|name| !name.is_empty()), &class, causes);
        for (name, value) in [
            ("dataSource", &claim.data_source),
            ("dataSourceRef", &claim.data_source_ref),
        ] {
            if value.is_some() {
                let message = "is not supported: say by spec.source what fills the volume";
                causes.not_supported(&path.child(name), message);
            }
        }
    }

    fn validate_source(&self, path: &FieldPath, causes: &mut Causes) {
        let field = path.child("source");
        match (&self.source, &self.source_ref) {
            (Some(_), Some(_)) => causes.invalid(&field, "and sourceRef must not both be given"),
            (None, None) => causes.required(&field, "is required"),
            (None, Some(reference)) => {
                let path = path.child("sourceRef");
                causes.one_of(&path.child("kind"), &reference.kind, &["DataSource"]);
                let field = path.child("name");
                match reference.name.as_str() {
                    "" => causes.required(&field, "is required"),
                    name => optional_name(Some(name), &field, causes),
                }
            }
            (Some(source), None) => source.validate(&field, causes),
        }
    }
}

impl DataVolumeSource {
    fn validate(&self, path: &FieldPath, causes: &mut Causes) {
        let given = [
            ("http", self.http.is_some()),
            ("registry", self.registry.is_some()),
            ("pvc", self.pvc.is_some()),
            ("snapshot", self.snapshot.is_some()),
            ("upload", self.upload.is_some()),
            ("blank", self.blank.is_some()),
            ("s3", self.s3.is_some()),
            ("gcs", self.gcs.is_some()),
            ("imageio", self.imageio.is_some()),
            ("vddk", self.vddk.is_some()),
        ];
        let given: Vec<&str> = given
            .iter()
            .filter_map(|(name, given)| given.then_some(*name))
            .collect();
        if given.len() != 1 {
            causes.invalid(path, "must have exactly one kind of source");
        }
        for name in given {
            if !matches!(
                name,
                "http" | "registry" | "pvc" | "snapshot" | "upload" | "blank"
            ) {
                let message = "is not supported; supported are http, registry, pvc, snapshot, \
                               upload and blank";
                causes.not_supported(&path.child(name), message);
            }
        }
        if let Some(claim) = &self.pvc {
            let field = path.child("pvc.name");
            match claim.name.as_str() {
                "" => causes.required(&field, "is required"),
                name => optional_name(Some(name), &field, causes),
            }
        }
        if let Some(snapshot) = &self.snapshot {
            snapshot.validate_name(&path.child("snapshot"), causes);
        }
        if let Some(http) = &self.http {
            http.validate(&path.child("http"), causes);
        }
        if let Some(registry) = &self.registry {
            registry.validate(&path.child("registry"), causes);
        }
    }
}

impl HttpSource {
    fn validate(&self, path: &FieldPath, causes: &mut Causes) {
        let url = path.child("url");
        if self.url.is_empty() {
            causes.required(&url, "is required");
        } else if !is_http_url(&self.url) {
            causes.invalid(&url, "must be http://HOST/PATH or https://HOST/PATH");
        }
        optional_name(self.secret_ref.as_deref(), &path.child("secretRef"), causes);
        optional_name(
            self.cert_config_map.as_deref(),
            &path.child("certConfigMap"),
            causes,
        );
        for (name, list) in [
            ("extraHeaders", &self.extra_headers),
            ("secretExtraHeaders", &self.secret_extra_headers),
        ] {
            if !list.is_empty() {
                causes.not_supported(&path.child(name), "are not supported");
            }
            if list.len() > MAX_HEADERS {
                causes.invalid(&path.child(name), "are too many");
            }
        }
        if self.insecure_skip_verify == Some(true) {
            let message = "is not supported: give the server's authority by certConfigMap";
            causes.not_supported(&path.child("insecureSkipVerify"), message);
        }
        if let Some(checksum) = self.checksum.as_deref().filter(|text| !text.is_empty())
            && !is_checksum(checksum)
        {
            let message = format!(
                "is {}, but must be sha256: and 64 hexadecimal digits, or sha512: and 128",
                shown(checksum)
            );
            causes.invalid(&path.child("checksum"), message);
        }
    }
}

impl RegistrySource {
    fn validate(&self, path: &FieldPath, causes: &mut Causes) {
        let field = path.child("url");
        match self.url.as_deref().filter(|url| !url.is_empty()) {
            None if self.image_stream.is_none() => causes.required(&field, "is required"),
            None => {}
            Some(url) if self.image().is_none() || url.len() > MAX_URL => {
                causes.invalid(&field, "must be docker://HOST/NAME:TAG");
            }
            Some(_) => {}
        }
        if self.image_stream.is_some() {
            let message = "is not supported: give the image by url";
            causes.not_supported(&path.child("imageStream"), message);
        }
        match self.pull_method.as_deref().unwrap_or_default() {
            "" | "pod" => {}
            "node" => causes.not_supported(
                &path.child("pullMethod"),
                "is \"node\", which is not supported: leave it out",
            ),
            other => causes.one_of(&path.child("pullMethod"), other, &["pod", "node"]),
        }
        optional_name(self.secret_ref.as_deref(), &path.child("secretRef"), causes);
        optional_name(
            self.cert_config_map.as_deref(),
            &path.child("certConfigMap"),
            causes,
        );
        if self.platform.as_ref().is_some_and(|platform| {
            let architecture = platform.get("architecture");
            architecture.is_some_and(|architecture| architecture != "amd64")
        }) {
            let field = path.child("platform.architecture");
            causes.not_supported(&field, "must be amd64");
        }
    }

    /// The image's reference: the URL without `docker://`.
    #[must_use]
    pub fn image(&self) -> Option<&str> {
        let image = self.url.as_deref()?.strip_prefix("docker://")?;
        let is_plain = image.bytes().all(|byte| byte.is_ascii_graphic());
        (!image.is_empty() && is_plain && is_clean_absolute_path(&format!("/{image}")))
            .then_some(image)
    }
}

fn optional_name(name: Option<&str>, path: &FieldPath, causes: &mut Causes) {
    if let Some(name) = name
        && !is_dns_subdomain(name)
    {
        let given = shown(name);
        causes.invalid(path, format_args!("is {given}, not the name of an object"));
    }
}

/// Whether this can be a URL of a web server. Whoever fetches it parses it.
fn is_http_url(url: &str) -> bool {
    let rest = ["http://", "https://"].iter().find_map(|scheme| {
        let start = url.get(..scheme.len())?;
        start
            .eq_ignore_ascii_case(scheme)
            .then(|| &url[scheme.len()..])
    });
    let host = rest.and_then(|rest| rest.split(['/', '?', '#']).next());
    url.len() <= MAX_URL
        && url.bytes().all(|byte| byte.is_ascii_graphic())
        && host.is_some_and(|host| host.rsplit('@').next().is_some_and(|host| !host.is_empty()))
}

fn is_checksum(text: &str) -> bool {
    let Some((algorithm, digits)) = text.split_once(':') else {
        return false;
    };
    let length = match algorithm {
        "sha256" => 64,
        "sha512" => 128,
        _ => return false,
    };
    digits.len() == length && digits.bytes().all(|byte| byte.is_ascii_hexdigit())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn fields(spec: Value) -> Vec<String> {
        let spec: DataVolumeSpec = serde_json::from_value(spec).unwrap();
        let causes = spec.validate(&FieldPath::new("spec"));
        for cause in &causes {
            assert!(cause.message.starts_with(&cause.field), "{}", cause.message);
        }
        causes.into_iter().map(|cause| cause.field).collect()
    }

    fn with(source: Value) -> Value {
        json!({
            "source": source,
            "storage": { "resources": { "requests": { "storage": "1Gi" } } },
        })
    }

    #[test]
    fn what_is_supported_is_accepted() {
        let http = json!({ "http": {
            "url": "https://user@host:8443/a/disk.qcow2?x=1", "secretRef": "s",
            "certConfigMap": "c", "checksum": format!("sha256:{}", "Ab".repeat(32)),
        }});
        let registry = json!({ "registry": {
            "url": "docker://quay.io:443/a/b@sha256:00", "pullMethod": "pod",
            "platform": { "architecture": "amd64" },
        }});
        for source in [
            http,
            registry,
            json!({ "blank": {} }),
            json!({ "upload": {} }),
        ] {
            assert_eq!(fields(with(source)), [""; 0]);
        }
        let pvc = json!({
            "accessModes": ["ReadWriteOnce"], "volumeMode": "Block", "storageClassName": "",
            "resources": { "requests": { "storage": "1Mi" } },
        });
        let spec = json!({ "source": { "blank": {} }, "pvc": pvc, "contentType": "kubevirt" });
        assert_eq!(fields(spec), [""; 0]);
    }

    #[test]
    fn each_rule_names_its_field() {
        let blank = || json!({ "blank": {} });
        let sized = |size: &str| json!({ "resources": { "requests": { "storage": size } } });
        let mut both = with(blank());
        both["pvc"] = sized("1Gi");
        let storage = |field: &str, value: Value| {
            let mut spec = with(blank());
            spec["storage"][field] = value;
            spec
        };
        let top = |field: &str, value: Value| {
            let mut spec = with(blank());
            spec[field] = value;
            spec
        };
        let http = |http: Value| with(json!({ "http": http }));
        let registry = |registry: Value| with(json!({ "registry": registry }));
        let url = "http://h/";
        for (spec, expected) in [
            (json!({}), &["spec.PVC", "spec.source"][..]),
            (both, &["spec.PVC"]),
            (
                json!({ "source": blank(), "pvc": sized("1Gi") }),
                &["spec.PVC.accessModes"],
            ),
            (
                storage("accessModes", json!(["ReadWriteOnce", "ReadOnlyMany"])),
                &["spec.storage.accessModes"],
            ),
            (
                storage("accessModes", json!(["Once"])),
                &["spec.storage.accessModes"],
            ),
            (
                storage("volumeMode", json!("Tape")),
                &["spec.storage.volumeMode"],
            ),
            (
                json!({ "source": blank(), "storage": {} }),
                &["spec.storage.resources.requests.size"],
            ),
            (
                json!({ "source": blank(), "storage": sized("0") }),
                &["spec.storage.resources.requests.size"],
            ),
            (
                json!({ "source": blank(), "storage": sized("-1Gi") }),
                &["spec.storage.resources.requests.size"],
            ),
            (
                json!({ "source": blank(), "storage": sized("1Ki") }),
                &["spec.storage.resources.requests.size"],
            ),
            (
                json!({ "source": blank(), "storage": sized("much") }),
                &["spec.storage.resources.requests.size"],
            ),
            (
                storage("dataSource", json!({ "kind": "X" })),
                &["spec.storage.dataSource"],
            ),
            (
                storage("storageClassName", json!("a/b")),
                &["spec.storage.storageClassName"],
            ),
            (with(json!({})), &["spec.source"]),
            (
                with(json!({ "blank": {}, "http": { "url": url } })),
                &["spec.source"],
            ),
            (
                with(json!({ "s3": { "url": "s3://x" } })),
                &["spec.source.s3"],
            ),
            (
                top("sourceRef", json!({ "kind": "DataSource", "name": "x" })),
                &["spec.source"],
            ),
            (http(json!({})), &["spec.source.http.url"]),
            (
                http(json!({ "url": "file:///etc/passwd" })),
                &["spec.source.http.url"],
            ),
            (
                http(json!({ "url": "http://user@/x" })),
                &["spec.source.http.url"],
            ),
            (
                http(json!({ "url": url, "checksum": "md5:00" })),
                &["spec.source.http.checksum"],
            ),
            (
                http(json!({ "url": url, "secretRef": "../x" })),
                &["spec.source.http.secretRef"],
            ),
            (
                http(json!({ "url": url, "insecureSkipVerify": true })),
                &["spec.source.http.insecureSkipVerify"],
            ),
            (with(json!({ "pvc": {} })), &["spec.source.pvc.name"]),
            (
                with(json!({ "pvc": { "name": "a/b" } })),
                &["spec.source.pvc.name"],
            ),
            (registry(json!({})), &["spec.source.registry.url"]),
            (
                registry(json!({ "url": "docker://" })),
                &["spec.source.registry.url"],
            ),
            (
                registry(json!({ "url": "docker://h/../x" })),
                &["spec.source.registry.url"],
            ),
            (
                registry(json!({ "url": "docker://h/x", "pullMethod": "node" })),
                &["spec.source.registry.pullMethod"],
            ),
            (
                registry(json!({ "imageStream": "x" })),
                &["spec.source.registry.imageStream"],
            ),
            (top("contentType", json!("archive")), &["spec.contentType"]),
            (top("contentType", json!("other")), &["spec.contentType"]),
            (top("checkpoints", json!([{}])), &["spec.checkpoints"]),
            (
                top("priorityClassName", json!("A B")),
                &["spec.priorityClassName"],
            ),
        ] {
            assert_eq!(fields(spec.clone()), expected, "{spec}");
        }
    }

    #[test]
    fn a_copy_has_the_size_of_its_source_and_names_its_namespace() {
        let copy = |namespace: Value| -> DataVolumeSpec {
            let source = json!({ "pvc": { "namespace": namespace, "name": "a" } });
            serde_json::from_value(json!({ "source": source, "storage": {} })).unwrap()
        };
        let path = FieldPath::new("spec");
        for namespace in [Value::Null, json!(""), json!("here")] {
            let spec = copy(namespace);
            assert_eq!(spec.validate_in("here", &path), []);
            assert_eq!(spec.foreign_source("here"), None);
        }
        let spec = copy(json!("there"));
        assert_eq!(spec.validate_in("here", &path), []);
        let source = spec.foreign_source("here").unwrap();
        assert_eq!(
            (source.namespace, source.kind.name()),
            ("there".into(), "PersistentVolumeClaim")
        );
        for namespace in ["../kube-system", "a/b", "A", "a.b"] {
            let causes = copy(json!(namespace)).validate_in("here", &path);
            assert_eq!(causes[0].field, "spec.source.pvc.namespace");
            let reference = json!({ "kind": "DataSource", "name": "a", "namespace": namespace });
            let spec = json!({ "sourceRef": reference, "storage": {} });
            let spec: DataVolumeSpec = serde_json::from_value(spec).unwrap();
            let causes = spec.validate_in("here", &path);
            assert_eq!(causes[0].field, "spec.sourceRef.namespace");
        }
        let mut spec = copy(Value::Null);
        spec.default_size(&crate::Quantity::new("2Gi"));
        spec.default_size(&crate::Quantity::new("9Gi"));
        assert_eq!(spec.disk_size(), Some(2 << 30));
    }

    #[test]
    fn a_specification_does_not_change() {
        let spec = |size: &str| -> DataVolumeSpec {
            let request = json!({ "requests": { "storage": size } });
            serde_json::from_value(json!({ "storage": { "resources": request } })).unwrap()
        };
        let path = FieldPath::new("spec");
        assert!(spec("1Gi").validate_update(&spec("1Gi"), &path).is_empty());
        assert_eq!(spec("1Gi").validate_update(&spec("2Gi"), &path).len(), 1);
    }
}
