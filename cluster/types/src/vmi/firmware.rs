//! Machine type, identity and boot (`spec.domain.{machine,firmware,chassis}`).

use serde_json::Value;

use super::{Domain, VmiSpec};
use crate::{
    Causes, ClusterConfig, FieldPath, cause::shown, config::ARCHITECTURE,
    names::is_clean_absolute_path,
};

/// Longer texts do not fit into the tables that a guest reads.
const MAX_IDENTITY: usize = 256;

/// The kernel's own limit of its command line on x86-64, less the end of the text.
const MAX_KERNEL_ARGS: usize = 2047;

const PULL_POLICIES: [&str; 4] = ["", "Always", "IfNotPresent", "Never"];

object! {
    /// The machine's type: it is read and changes nothing.
    pub struct Machine {
        /// Its name.
        #[serde(rename = "type")]
        pub kind: String,
    }

    /// Identity and boot.
    pub struct Firmware {
        /// The machine's UUID.
        pub uuid: Option<String>,
        /// The machine's serial number.
        pub serial: Option<String>,
        /// What loads the operating system from the disk.
        pub bootloader: Option<Bootloader>,
        /// Boots a kernel of an image instead of the disk's.
        pub kernel_boot: Option<KernelBoot>,
        /// Refused.
        pub acpi: Option<Value>,
    }

    /// What loads the operating system from the disk.
    pub struct Bootloader {
        /// The default.
        pub bios: Option<Bios>,
        /// A UEFI firmware, where the node has one.
        pub efi: Option<Efi>,
    }

    /// The default loader.
    pub struct Bios {
        /// Shows the loader's messages on the serial console.
        pub use_serial: Option<bool>,
    }

    /// UEFI.
    pub struct Efi {
        /// Boots signed loaders only.
        pub secure_boot: Option<bool>,
        /// Keeps its variables.
        pub persistent: Option<bool>,
    }

    /// A kernel of an image.
    pub struct KernelBoot {
        /// The kernel's command line.
        pub kernel_args: Option<String>,
        /// Where the kernel is.
        pub container: Option<KernelBootContainer>,
    }

    /// An image with a kernel.
    pub struct KernelBootContainer {
        /// The image.
        pub image: String,
        /// Secret for the registry.
        pub image_pull_secret: Option<String>,
        /// When the image is pulled.
        pub image_pull_policy: Option<String>,
        /// The kernel's path in the image.
        pub kernel_path: Option<String>,
        /// The initramfs' path in the image.
        pub initrd_path: Option<String>,
    }

    /// The chassis that the tables name.
    pub struct Chassis {
        /// Manufacturer.
        pub manufacturer: Option<String>,
        /// Version.
        pub version: Option<String>,
        /// Serial number.
        pub serial: Option<String>,
        /// Asset tag.
        pub asset: Option<String>,
        /// Stock keeping unit.
        pub sku: Option<String>,
    }
}

pub(super) fn validate_machine(
    spec: &VmiSpec,
    config: &ClusterConfig,
    domain: &FieldPath,
    causes: &mut Causes,
) {
    let Some(machine) = spec
        .domain
        .machine
        .as_ref()
        .filter(|machine| !machine.kind.is_empty())
    else {
        return;
    };
    let known = config
        .machine_types
        .iter()
        .any(|pattern| match pattern.strip_suffix('*') {
            Some(prefix) => machine.kind.starts_with(prefix),
            None => machine.kind == *pattern,
        });
    if !known {
        causes.not_supported(
            &domain.child("machine.type"),
            format_args!(
                "is {}, but must be one of: {}",
                shown(&machine.kind),
                config.machine_types.join(", ")
            ),
        );
    }
}

/// The guest's architecture.
pub(super) fn validate_architecture(spec: &VmiSpec, path: &FieldPath, causes: &mut Causes) {
    if let Some(architecture) = &spec.architecture {
        causes.one_of(&path.child("architecture"), architecture, &[ARCHITECTURE]);
    }
}

pub(super) fn validate(domain: &Domain, path: &FieldPath, causes: &mut Causes) {
    if let Some(chassis) = &domain.chassis {
        let path = path.child("chassis");
        let Chassis {
            manufacturer,
            version,
            serial,
            asset,
            sku,
        } = chassis;
        let texts = [
            ("manufacturer", manufacturer),
            ("version", version),
            ("serial", serial),
            ("asset", asset),
            ("sku", sku),
        ];
        for (name, text) in texts {
            validate_text(text.as_deref(), &path.child(name), causes);
        }
    }
    let Some(firmware) = &domain.firmware else {
        return;
    };
    let path = path.child("firmware");
    validate_text(firmware.serial.as_deref(), &path.child("serial"), causes);
    if let Some(uuid) = firmware.uuid.as_deref().filter(|uuid| !is_uuid(uuid)) {
        causes.invalid(
            &path.child("uuid"),
            format_args!("is {}, not a UUID", shown(uuid)),
        );
    }
    if let Some(bootloader) = &firmware.bootloader {
        let path = path.child("bootloader");
        match (&bootloader.bios, &bootloader.efi) {
            (Some(_), Some(_)) => causes.invalid(&path, "must not have both bios and efi"),
            (None, Some(efi)) => validate_efi(efi, &path.child("efi"), causes),
            _ => {}
        }
        if bootloader.efi.is_some() && firmware.kernel_boot.is_some() {
            causes.invalid(&path.child("efi"), "must not be there with a kernelBoot");
        }
    }
    if let Some(boot) = &firmware.kernel_boot {
        validate_kernel_boot(boot, &path.child("kernelBoot"), causes);
    }
}

/// Signatures are checked unless somebody says that they are not, as in KubeVirt.
fn validate_efi(efi: &Efi, path: &FieldPath, causes: &mut Causes) {
    if efi.secure_boot != Some(false) {
        causes.not_supported(
            &path.child("secureBoot"),
            "is on by default, and is not supported: set secureBoot: false",
        );
    }
    if efi.persistent == Some(true) {
        causes.not_supported(
            &path.child("persistent"),
            "is not supported: the firmware's variables are not kept",
        );
    }
}

fn validate_kernel_boot(boot: &KernelBoot, path: &FieldPath, causes: &mut Causes) {
    let args = boot.kernel_args.as_deref().unwrap_or("");
    if args.len() > MAX_KERNEL_ARGS || args.contains(['\n', '\0']) {
        causes.invalid(
            &path.child("kernelArgs"),
            format_args!("must be one line of at most {MAX_KERNEL_ARGS} bytes"),
        );
    }
    let Some(container) = &boot.container else {
        if !args.is_empty() {
            causes.invalid(&path.child("kernelArgs"), "needs a container with a kernel");
        }
        return;
    };
    let path = path.child("container");
    if container.image.is_empty() {
        causes.required(&path.child("image"), "is required");
    }
    let policy = container.image_pull_policy.as_deref().unwrap_or("");
    causes.one_of(&path.child("imagePullPolicy"), policy, &PULL_POLICIES);
    let paths = [
        ("kernelPath", &container.kernel_path),
        ("initrdPath", &container.initrd_path),
    ];
    let given = |path: &Option<String>| path.as_ref().is_some_and(|path| !path.is_empty());
    if !paths.iter().any(|(_, path)| given(path)) {
        causes.required(&path, "must have a kernelPath or an initrdPath");
    }
    for (name, value) in paths {
        let Some(value) = value.as_deref().filter(|value| !value.is_empty()) else {
            continue;
        };
        if !is_clean_absolute_path(value) {
            causes.invalid(
                &path.child(name),
                format_args!(
                    "is {}, but must be an absolute path without `..`",
                    shown(value)
                ),
            );
        }
    }
}

/// A text of a firmware table: printable, and not endless.
fn validate_text(text: Option<&str>, path: &FieldPath, causes: &mut Causes) {
    let Some(text) = text else { return };
    if text.len() > MAX_IDENTITY || !text.chars().all(|c| c.is_ascii_graphic() || c == ' ') {
        causes.invalid(
            path,
            format_args!(
                "is {}, but must have at most {MAX_IDENTITY} printable ASCII characters",
                shown(text)
            ),
        );
    }
}

fn is_uuid(text: &str) -> bool {
    let groups: Vec<_> = text.split('-').collect();
    groups.iter().map(|group| group.len()).eq([8, 4, 4, 4, 12])
        && groups
            .iter()
            .all(|group| group.bytes().all(|byte| byte.is_ascii_hexdigit()))
}
