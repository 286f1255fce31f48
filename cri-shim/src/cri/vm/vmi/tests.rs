//! Machines of the pods that the cluster's controller makes: `cluster/tests/pods`, which its own
//! tests keep.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use podvisor_cloud_init::{Form, NetworkConfig, UserData};
use podvisor_cri_messages::{
    Capability, ContainerConfig, Device, ImageSpec, Int64Value, LinuxContainerConfig,
    LinuxContainerSecurityContext, Mount, PodSandboxConfig, SecurityProfile,
};
use podvisor_images::{ImportSource, PullOptions, Store};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::super::disks::DiskFiles;
use super::super::{honour, images, size};
use super::seed::SeedMaker;
use super::sources::Sources;
use super::*;
use crate::cri::state::{DiskContent, DiskRecord, NodeFile};
use crate::cri::vm_spec::{Booter, DiskSource, SeedText, VMI as ANNOTATION, VmiBoot, VmiMachine};

mod cards;
mod refused;

const KEY: &str =
    "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDEy me";

/// A pod of the controller, as a kubelet asks for it.
struct Fixture {
    dir: TempDir,
    sandbox: PodSandboxConfig,
    container: ContainerConfig,
}

impl Fixture {
    fn new(name: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../cluster/tests/pods")
            .join(format!("{name}.json"));
        let stored: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
        let pod = &stored["pod"];
        let sandbox = PodSandboxConfig {
            hostname: pod["spec"]["hostname"].as_str().unwrap().to_owned(),
            annotations: serde_json::from_value(pod["metadata"]["annotations"].clone()).unwrap(),
            ..PodSandboxConfig::default()
        };
        let container = container(&dir, pod);
        Self {
            dir,
            sandbox,
            container,
        }
    }

    fn machine(&self) -> VmiMachine {
        let machine = VmiMachine::of_annotations(&self.sandbox.annotations);
        machine.unwrap().unwrap()
    }

    /// The directory of a volume on the node.
    fn volume(&self, name: &str) -> &Path {
        let at = format!("/podvisor/volumes/{name}");
        let mut mounts = self.container.mounts.iter();
        let mount = mounts.find(|mount| mount.container_path == at).unwrap();
        Path::new(&mount.host_path)
    }

    fn write(&self, volume: &str, name: &str, content: &str) {
        fs::write(self.volume(volume).join(name), content).unwrap();
    }

    /// Imports an image with one file.
    fn import(&self, image: &str, path: &str) -> Store {
        let tree = tempfile::tempdir().unwrap();
        let file = tree.path().join(path);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(&file, [b'x'; 4096]).unwrap();
        let store = Store::open(self.dir.path().join("store")).unwrap();
        let source = ImportSource::Directory(tree.path().to_owned());
        let options = PullOptions::default();
        store.import(source, Some(image), &options).unwrap();
        store
    }

    fn make(&self, store: &Store) -> Result<Vec<DiskRecord>> {
        let machine = self.machine();
        let image = self.container.image.as_ref().unwrap().image.as_str();
        let disk = (!images::is_none(image)).then(|| store.container_disk(image).unwrap());
        let files = DiskFiles::at(self.dir.path().join("machine"));
        files.prepare().unwrap();
        let disks = VmiDisks {
            machine: &machine,
            container: &self.container,
            image: disk.as_ref(),
            store,
            files: &files,
            host_name: self.sandbox.hostname.clone(),
            agent: None,
        };
        disks.make()
    }

    fn store(&self) -> Store {
        Store::open(self.dir.path().join("store")).unwrap()
    }
}

/// The container's configuration, with volumes where a kubelet has them.
fn container(dir: &TempDir, pod: &Value) -> ContainerConfig {
    let made = &pod["spec"]["containers"][0];
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let kinds = [
        ("secret", "secret"),
        ("configMap", "configmap"),
        ("downwardAPI", "downward-api"),
        ("projected", "projected"),
        ("persistentVolumeClaim", "local-volume"),
        ("emptyDir", "empty-dir"),
    ];
    let mut mounts = vec![
        Mount {
            container_path: "/etc/hosts".to_owned(),
            host_path: "/pods/u/etc-hosts".to_owned(),
            ..Mount::default()
        },
        Mount {
            container_path: "/dev/termination-log".to_owned(),
            host_path: "/pods/u/containers/compute/1a2b".to_owned(),
            ..Mount::default()
        },
    ];
    for mount in list(&made["volumeMounts"]) {
        let volumes = list(&pod["spec"]["volumes"]);
        let mut volumes = volumes.iter();
        let volume = volumes.find(|volume| volume["name"] == mount["name"]);
        let volume = volume.unwrap();
        let image = text(&volume["image"]["reference"]);
        let kind = kinds.iter().find(|(field, _)| !volume[field].is_null());
        let host = kind.map(|(_, kind)| {
            let name = text(&mount["name"]);
            let host = dir.path().join("volumes");
            let host = host.join(format!("kubernetes.io~{kind}")).join(name);
            fs::create_dir_all(&host).unwrap();
            host.display().to_string()
        });
        mounts.push(Mount {
            container_path: text(&mount["mountPath"]),
            host_path: host.unwrap_or_default(),
            readonly: mount["readOnly"] == true,
            image: Some(ImageSpec {
                image,
                ..ImageSpec::default()
            }),
            ..Mount::default()
        });
    }
    let devices = list(&made["volumeDevices"]);
    ContainerConfig {
        image: Some(ImageSpec {
            image: text(&made["image"]),
            ..ImageSpec::default()
        }),
        mounts,
        devices: devices
            .iter()
            .map(|device| Device {
                container_path: text(&device["devicePath"]),
                host_path: "/dev/null".to_owned(),
                permissions: "mrw".to_owned(),
            })
            .collect(),
        linux: Some(LinuxContainerConfig {
            security_context: Some(security(&made["securityContext"])),
            ..LinuxContainerConfig::default()
        }),
        ..ContainerConfig::default()
    }
}

fn security(given: &Value) -> LinuxContainerSecurityContext {
    LinuxContainerSecurityContext {
        run_as_user: given["runAsUser"]
            .as_i64()
            .map(|value| Int64Value { value }),
        no_new_privs: given["allowPrivilegeEscalation"] == false,
        capabilities: Some(Capability {
            drop_capabilities: vec![given["capabilities"]["drop"][0].as_str().unwrap().into()],
            ..Capability::default()
        }),
        seccomp: Some(SecurityProfile::default()),
        ..LinuxContainerSecurityContext::default()
    }
}

fn serials(disks: &[DiskRecord]) -> Vec<&str> {
    disks.iter().map(|disk| disk.serial.as_str()).collect()
}

/// Why a specification is refused.
fn refused(spec: Value) -> String {
    let text = json!({"metadata": {"name": "a", "namespace": "b"}, "spec": spec}).to_string();
    let annotations = [(ANNOTATION.to_owned(), text)].into();
    let error = VmiMachine::of_annotations(&annotations).unwrap_err();
    error.to_string()
}

#[test]
fn a_container_disk_is_a_machine_with_its_identity_and_its_disks_in_order() {
    let fixture = Fixture::new("container-disk");
    let machine = fixture.machine();
    assert_eq!((machine.vcpus, machine.memory), (2, 256 << 20));
    assert_eq!(machine.uuid.unwrap()[..4], [0x5d, 0x30, 0x7c, 0xa9]);
    let serial = machine.identity.serial.as_deref();
    assert_eq!(serial, Some("e4686d2c-6e8d-4335-b8fd-81bee22f4815"));
    let asset = machine.identity.chassis_asset_tag.as_deref();
    assert_eq!(asset, Some("Shelf-7"));
    assert_eq!(machine.boot, VmiBoot::Disk("root".to_owned()));
    assert!(!machine.starts_paused);

    let store = fixture.import("registry.example/debian:12", "disk/debian.raw");
    let disks = fixture.make(&store).unwrap();
    assert_eq!(serials(&disks), ["root", "seed", "SCRATCH-1"]);
    let read_only: Vec<bool> = disks.iter().map(|disk| disk.is_read_only).collect();
    assert_eq!(read_only, [false, true, false]);
    assert!(matches!(
        &disks[0].content,
        DiskContent::Image {
            overlay: Some(_),
            ..
        }
    ));
    let made = fixture.dir.path().join("machine/1.img");
    assert_eq!(disks[1].content, DiskContent::Made("1.img".to_owned()));
    let seed = fs::read(made).unwrap();
    let has = |part: &[u8]| seed.windows(part.len()).any(|bytes| bytes == part);
    assert!(has(b"#cloud-config\npackage_update: false\n"));
    assert!(has(b"container-disk.tenant") && has(b"local-hostname"));
    let empty = fixture.volume("scratch").join("disk.img");
    assert_eq!(fs::metadata(&empty).unwrap().len(), 64 << 20);
    assert_eq!(disks[2].content, DiskContent::Node(NodeFile::File(empty)));
}

#[test]
fn a_pods_size_is_its_guests_and_not_its_limits() {
    let size = size(&Fixture::new("container-disk").sandbox).unwrap();
    assert_eq!((size.memory, size.vcpus), (256 << 20, 2));
}

#[test]
fn a_machine_is_made_for_what_it_may_get_while_it_runs() {
    let size = |domain: Value| {
        let spec = json!({
            "domain": domain,
            "volumes": [{"name": "root", "containerDisk": {"image": "a"}}],
        });
        let text = json!({"metadata": {"name": "a", "namespace": "b"}, "spec": spec}).to_string();
        let annotations = [(ANNOTATION.to_owned(), text)].into();
        let machine = VmiMachine::of_annotations(&annotations).unwrap().unwrap();
        (machine.vcpus, machine.max_vcpus, machine.growth >> 20)
    };
    let of = |sockets: i64, most: i64, guest: &str, max_guest: &str| {
        size(json!({
            "cpu": {"cores": 2, "sockets": sockets, "maxSockets": most},
            "memory": {"guest": guest, "maxGuest": max_guest},
        }))
    };
    assert_eq!(of(1, 4, "1Gi", "4Gi"), (2, 8, 3072));
    assert_eq!(of(2, 0, "1Gi", "1Gi"), (4, 4, 0));
    // No machine has more CPUs, and less than a unit of memory is not plugged in.
    assert_eq!(of(64, 256, "1Gi", "1300Mi"), (128, 254, 256));
    assert_eq!(of(64, 256, "1Gi", "9000Gi"), (128, 254, 1 << 20));
    let bounds = size(json!({"cpu": {"cores": 2}, "memory": {"guest": "1Gi"}}));
    assert_eq!(bounds, (2, 2, 0));
}

#[test]
fn what_the_controller_asks_for_is_accepted() {
    for name in [
        "container-disk",
        "volumes",
        "boot-from-volume",
        "kernel-boot",
    ] {
        let fixture = Fixture::new(name);
        honour::check_pod(&fixture.sandbox).unwrap();
        honour::check_container(&fixture.container, true).unwrap();
        check_container(&fixture.container).unwrap();
        fixture.machine();
    }
}

#[test]
fn each_kind_of_volume_is_a_disk() {
    let mut fixture = Fixture::new("volumes");
    let machine = fixture.machine();
    assert!(machine.starts_paused);
    // The order of boot chooses the disk, not its place.
    assert_eq!(machine.boot, VmiBoot::Disk("root".to_owned()));
    let expected = [
        "data", "root", "base", "tools", "map", "key", "me", "token", "seed", "image",
    ];
    let names: Vec<&str> = machine
        .disks
        .iter()
        .map(|disk| disk.name.as_str())
        .collect();
    assert_eq!(names, expected);

    // A device must be one, as claims must be what the pod has.
    fixture.write("data", "disk.img", "data");
    fixture.write("base", "disk.img", "base");
    let store = fixture.import("registry.example/debian:12", "disk/debian.raw");
    fixture.import("registry.example/tools:1", "disk/tools.iso");
    let error = fixture.make(&store).unwrap_err().to_string();
    assert!(error.contains("spec.volumes[0]"), "{error}");
    assert!(error.contains("not a block device"), "{error}");

    // As if it were a file system.
    let device = fixture.container.devices.pop().unwrap();
    let host = fixture.dir.path().join("root");
    fs::create_dir(&host).unwrap();
    fs::write(host.join("disk.img"), "root").unwrap();
    fixture.container.mounts.push(Mount {
        container_path: device.container_path.replace("devices", "volumes"),
        host_path: host.display().to_string(),
        ..Mount::default()
    });
    fixture.write("map", "colour", "blue");
    fixture.write("key", "password", "secret");
    fixture.write("me", "labels", "a=b");
    fixture.write("token", "token", "jwt");
    fixture.write("seed-userdata", "userData", "#!/bin/sh\n");
    fixture.write("seed-networkdata", "networkdata", "{}");
    fixture.write("access-credential-0", "me", KEY);
    let disks = fixture.make(&store).unwrap();
    assert_eq!(serials(&disks), expected);
    let writable: Vec<&str> = disks
        .iter()
        .filter(|disk| !disk.is_read_only)
        .map(|disk| disk.serial.as_str())
        .collect();
    assert_eq!(writable, ["data", "root", "base", "image"]);
    let DiskContent::Ephemeral { base, .. } = &disks[2].content else {
        panic!("{:?}", disks[2]);
    };
    assert_eq!(base.path(), fixture.volume("base").join("disk.img"));
    // What is never written is the image itself.
    assert!(matches!(
        disks[3].content,
        DiskContent::Image { overlay: None, .. }
    ));
    for (index, label) in [(4, "settings"), (5, "cfgdata"), (8, "config-2")] {
        let volume = fixture.dir.path().join(format!("machine/{index}.img"));
        let bytes = fs::read(volume).unwrap();
        let label = label.as_bytes();
        let has_label = bytes.windows(label.len()).any(|part| part == label);
        assert!(has_label, "{index}");
    }
}

#[test]
fn cloud_init_is_told_what_the_secrets_say() {
    let fixture = Fixture::new("volumes");
    fixture.write("seed-userdata", "userdata", "#!/bin/sh\n");
    fixture.write("seed-networkdata", "networkData", "{}");
    fixture.write("access-credential-0", "me", &format!("{KEY}\n"));
    let machine = fixture.machine();
    let mut disks = machine.disks.iter();
    let disk = disks.find(|disk| disk.name == "seed").unwrap();
    let DiskSource::Seed(seed) = &disk.source else {
        panic!("{disk:?}");
    };
    assert_eq!(
        (&seed.user_data, &seed.network_data),
        (&SeedText::Secret, &SeedText::Secret)
    );
    let maker = SeedMaker {
        machine: &machine,
        sources: Sources(&fixture.container),
        host_name: "volumes",
        agent: Some(b"a program"),
    };
    let told = maker.seed(disk, seed).unwrap();
    assert_eq!(told.form, Form::ConfigDrive);
    assert_eq!(told.user_data, UserData::Document(b"#!/bin/sh\n".to_vec()));
    assert_eq!(told.network, NetworkConfig::Document("{}".to_owned()));
    assert_eq!(told.ssh_keys, [KEY]);
    assert_eq!(told.agent.as_deref(), Some(&b"a program"[..]));
    fs::remove_file(fixture.volume("seed-userdata").join("userdata")).unwrap();
    let error = maker.seed(disk, seed).unwrap_err().to_string();
    assert!(error.contains("without the key userdata"), "{error}");
}

#[test]
fn a_claim_is_never_left_by_a_link() {
    let fixture = Fixture::new("boot-from-volume");
    let error = fixture.make(&fixture.store()).unwrap_err().to_string();
    assert!(error.contains("spec.volumes[0] has no disk.img"), "{error}");
    let secret = fixture.dir.path().join("secret");
    fs::write(&secret, "of the node").unwrap();
    symlink(&secret, fixture.volume("root").join("disk.img")).unwrap();
    let error = fixture.make(&fixture.store()).unwrap_err().to_string();
    assert!(error.contains("cannot be opened as a disk"), "{error}");
    fs::remove_file(fixture.volume("root").join("disk.img")).unwrap();
    fixture.write("root", "disk.img", "a disk");
    let disks = fixture.make(&fixture.store()).unwrap();
    assert_eq!(serials(&disks), ["root"]);
}

#[test]
fn files_of_a_volume_that_no_kubelet_filled_are_not_read() {
    let mut fixture = Fixture::new("volumes");
    let other = fixture.dir.path().join("claim");
    fs::create_dir(&other).unwrap();
    symlink("/etc/passwd", other.join("userdata")).unwrap();
    for mount in &mut fixture.container.mounts {
        if mount.container_path.ends_with("/seed-userdata") {
            mount.host_path = other.display().to_string();
        }
    }
    let error = Sources(&fixture.container)
        .files("spec.volumes[9]", "seed-userdata")
        .unwrap_err();
    assert!(error.to_string().contains("is not a ConfigMap"), "{error}");
}

#[test]
fn a_kernel_of_an_image_is_copied() {
    let fixture = Fixture::new("kernel-boot");
    let tree = tempfile::tempdir().unwrap();
    fs::create_dir(tree.path().join("boot")).unwrap();
    fs::write(tree.path().join("boot/vmlinuz"), "kernel").unwrap();
    fs::write(tree.path().join("boot/initrd"), "initrd").unwrap();
    let store = fixture.store();
    let source = ImportSource::Directory(tree.path().to_owned());
    let options = PullOptions::default();
    let name = Some("registry.example/kernel:6");
    store.import(source, name, &options).unwrap();
    let machine = fixture.machine();
    let files = DiskFiles::at(fixture.dir.path().join("machine"));
    files.prepare().unwrap();
    let disks = VmiDisks {
        machine: &machine,
        container: &fixture.container,
        image: None,
        store: &store,
        files: &files,
        host_name: String::new(),
        agent: None,
    };
    assert_eq!(disks.make().unwrap(), []);
    let with_agent = VmiDisks {
        agent: Some(Vec::new()),
        ..disks
    };
    let said = with_agent.make().unwrap_err().to_string();
    assert!(said.contains("cloudInitNoCloud"), "{said}");
    let disks = with_agent;
    let kernel = disks.kernel().unwrap().unwrap();
    assert_eq!(kernel.cmdline, "console=ttyS0 quiet");
    assert!(kernel.has_initramfs);
    let copied = |name: &str| fs::read(fixture.dir.path().join("machine").join(name)).unwrap();
    assert_eq!(copied("kernel"), b"kernel");
    assert_eq!(copied("initramfs"), b"initrd");
}

#[test]
fn a_machine_with_efi_is_started_by_the_firmware() {
    let booter = |firmware: Value| {
        let spec = json!({
            "domain": {"memory": {"guest": "256Mi"}, "firmware": firmware},
            "volumes": [{"name": "a", "persistentVolumeClaim": {"claimName": "c"}}],
        });
        let text = json!({"metadata": {"name": "a", "namespace": "b"}, "spec": spec}).to_string();
        let annotations = [(ANNOTATION.to_owned(), text)].into();
        let machine = VmiMachine::of_annotations(&annotations).map_err(|error| error.to_string());
        machine.map(|machine| machine.unwrap().booter)
    };
    let efi = |efi: Value| booter(json!({"bootloader": {"efi": efi}}));
    assert_eq!(booter(json!({})), Ok(Booter::Loader));
    assert_eq!(efi(json!({"secureBoot": false})), Ok(Booter::Firmware));
    let error = efi(json!({})).unwrap_err();
    assert!(error.contains("bootloader.efi.secureBoot"), "{error}");
}

#[test]
fn serial_numbers_fit_and_are_unlike() {
    let long = "a-very-long-name-of-a-disk";
    let volumes: Vec<Value> = ["1", "2"]
        .iter()
        .map(|end| {
            let source = json!({"claimName": "c"});
            json!({"name": format!("{long}-{end}"), "persistentVolumeClaim": source})
        })
        .collect();
    let domain = json!({"memory": {"guest": "1Gi"}, "rebootPolicy": "Terminate"});
    let spec = json!({"domain": domain, "volumes": volumes});
    let text = json!({"metadata": {"name": "a", "namespace": "b"}, "spec": spec}).to_string();
    let annotations = [(ANNOTATION.to_owned(), text)].into();
    let machine = VmiMachine::of_annotations(&annotations).unwrap().unwrap();
    let serials: Vec<&str> = machine
        .disks
        .iter()
        .map(|disk| disk.serial.as_str())
        .collect();
    assert_eq!(serials, [&long[..20], "disk1"]);
    assert!(machine.ends_at_reboot);
}

#[test]
fn volumes_of_file_systems_are_shared_by_their_names() {
    let dir = tempfile::tempdir().unwrap();
    let spec = json!({
        "domain": {
            "memory": {"guest": "1Gi"},
            "devices": {
                "disks": [{"name": "root", "disk": {}}],
                "filesystems": [
                    {"name": "data", "virtiofs": {}},
                    {"name": "settings", "virtiofs": {}},
                ],
            },
        },
        "volumes": [
            {"name": "root", "persistentVolumeClaim": {"claimName": "r"}},
            {"name": "data", "persistentVolumeClaim": {"claimName": "d"}},
            {"name": "settings", "configMap": {"name": "s"}},
        ],
    });
    let text = json!({"metadata": {"name": "a", "namespace": "b"}, "spec": spec}).to_string();
    let annotations = [(ANNOTATION.to_owned(), text)].into();
    assert!(super::super::may_share(&annotations).unwrap());
    let machine = VmiMachine::of_annotations(&annotations).unwrap().unwrap();
    assert_eq!(machine.disks.len(), 1);
    let mount = |name: &str, path: &Path| Mount {
        container_path: format!("/podvisor/volumes/{name}"),
        host_path: path.to_str().unwrap().to_owned(),
        ..Mount::default()
    };
    let mut container = ContainerConfig {
        mounts: vec![mount("data", dir.path()), mount("settings", dir.path())],
        ..ContainerConfig::default()
    };
    let shares = machine.wanted_shares(&container).unwrap();
    let shares: Vec<_> = shares
        .iter()
        .map(|share| (share.tag.as_str(), share.mount.readonly))
        .collect();
    assert_eq!(shares, [("data", false), ("settings", true)]);
    // A claim's file is no directory, and a volume that the pod lacks is nothing.
    let file = dir.path().join("file");
    fs::write(&file, "").unwrap();
    container.mounts[0] = mount("data", &file);
    let error = machine.wanted_shares(&container).unwrap_err().to_string();
    assert!(error.contains("spec.volumes[1]"), "{error}");
    container.mounts.remove(0);
    let error = machine.wanted_shares(&container).unwrap_err().to_string();
    assert!(error.contains("not mounted by the pod"), "{error}");
}
