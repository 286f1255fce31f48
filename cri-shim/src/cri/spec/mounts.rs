//! Mounts of a container: the file systems that every program expects, the pod's shared memory,
//! then its volumes, in order of depth.

use std::collections::BTreeSet;
use std::path::{Component, Path};

use oci_spec::runtime::{Mount, MountBuilder};
use podvisor_agent_protocol::{FILL, MountSource, SHARED_DIR, SHARED_MEMORY, is_containers_own};
use podvisor_cri_messages::{Mount as CriMount, MountPropagation};
use rustix::fs::StatVfsMountFlags;

use super::fault::SpecFault;
use super::request::SpecRequest;
use super::users;
use super::volume::{MemorySource, Volume, VolumeSource};
use crate::bind::guest_options;
use crate::machine::UserRange;
use crate::sandbox::{default_mounts, image_source};

/// Maximum length of a path in an image: the kernel's limit.
const SUB_PATH_BYTES: usize = 4095;

/// Maximum number of volumes of one container.
pub(in crate::cri) const MAX_VOLUMES: usize = 512;

/// Maximum number of images that one container mounts: each is a disk of its pod's guest, which has
/// few.
const MAX_IMAGES: usize = 32;

/// Validates the mounts of a request, for a pod with these users, before anything is created.
pub(in crate::cri) fn check(
    mounts: &[CriMount],
    users: Option<UserRange>,
) -> Result<(), SpecFault> {
    if mounts.len() > MAX_VOLUMES {
        let reason = format!("{} are more than {MAX_VOLUMES}", mounts.len());
        return Err(SpecFault::invalid("mounts", reason));
    }
    let images: BTreeSet<_> = mounts.iter().filter_map(image_of).collect();
    if images.len() > MAX_IMAGES {
        let reason = format!("{} images are more than {MAX_IMAGES}", images.len());
        return Err(SpecFault::invalid("mounts.image", reason));
    }
    for mount in mounts {
        check_one(mount, users)?;
    }
    Ok(())
}

/// The paths in images that mounts are to show, checked and without parts that lead nowhere: `./a`
/// is `a`, and `.` all of the image.
pub(in crate::cri) fn sub_paths(mounts: &[CriMount]) -> Result<Vec<String>, SpecFault> {
    let inside = |path: &String| {
        let parts = Path::new(path).components();
        let parts = parts.filter(|part| *part != Component::CurDir);
        let names = parts.map(|part| match part {
            Component::Normal(name) => name.to_str(),
            _ => None,
        });
        let names = names.collect::<Option<Vec<_>>>();
        let fits = !path.contains('\0') && path.len() <= SUB_PATH_BYTES;
        let names = names.filter(|_| fits).ok_or_else(|| {
            SpecFault::invalid(
                "mounts.image_sub_path",
                format!(
                    "{:?} is not a path inside an image",
                    path.chars().take(256).collect::<String>()
                ),
            )
        })?;
        Ok(names.join("/"))
    };
    let paths = mounts.iter().map(|mount| &mount.image_sub_path);
    paths.map(inside).collect()
}

/// Returns the flags of each mount's `mount_options`.
pub(in crate::cri) fn asked_flags(
    mounts: &[CriMount],
) -> Result<Vec<StatVfsMountFlags>, SpecFault> {
    let flag = |option: &String| match option.as_str() {
        "noexec" => Ok(StatVfsMountFlags::NOEXEC),
        "nosuid" => Ok(StatVfsMountFlags::NOSUID),
        "nodev" => Ok(StatVfsMountFlags::NODEV),
        _ => Err(SpecFault::invalid(
            "mounts.mount_options",
            format!(
                "{:?} is not noexec, nosuid or nodev",
                option.chars().take(256).collect::<String>()
            ),
        )),
    };
    let flags = |mount: &CriMount| mount.mount_options.iter().map(flag).collect();
    mounts.iter().map(flags).collect()
}

fn check_one(mount: &CriMount, users: Option<UserRange>) -> Result<(), SpecFault> {
    let field = "mounts.container_path";
    let path = Path::new(&mount.container_path);
    if mount.container_path.is_empty() || mount.container_path.contains('\0') {
        return Err(SpecFault::invalid(
            field,
            "it is empty, or holds a NUL byte",
        ));
    }
    if path == Path::new("/") {
        return Err(SpecFault::invalid(
            field,
            "the root file system is the image's",
        ));
    }
    if is_containers_own(&absolute(&mount.container_path)) {
        return Err(SpecFault::Refused {
            field: "mounts.container_path (/dev)",
            reason: "/dev, and the devices and links that every container has in it, are the \
                     guest's, and device nodes in volumes open nothing; mount it elsewhere",
        });
    }
    users::check_mount(&mount.uid_mappings, &mount.gid_mappings, users)?;
    if image_of(mount).is_some() {
        return check_image(mount);
    }
    if !mount.host_path.starts_with('/') || mount.host_path.contains('\0') {
        let reason = format!("{:?} is not an absolute path", mount.host_path);
        return Err(SpecFault::invalid("mounts.host_path", reason));
    }
    match MountPropagation::try_from(mount.propagation) {
        Ok(MountPropagation::PropagationBidirectional) => Err(SpecFault::Refused {
            field: "mounts.propagation (Bidirectional)",
            reason: "mounts of a virtual machine cannot appear on the host; use None or \
                     HostToContainer",
        }),
        Ok(MountPropagation::PropagationHostToContainer) if mount.recursive_read_only => {
            Err(SpecFault::invalid(
                "mounts.recursive_read_only",
                "it contradicts propagation HostToContainer",
            ))
        }
        Ok(_) if mount.recursive_read_only && !mount.readonly => Err(SpecFault::invalid(
            "mounts.recursive_read_only",
            "it needs readonly",
        )),
        Ok(_) => Ok(()),
        Err(_) => {
            let reason = format!("{} is not a propagation", mount.propagation);
            Err(SpecFault::invalid("mounts.propagation", reason))
        }
    }
}

/// Returns the name of the mounted image.
pub(in crate::cri) fn image_of(mount: &CriMount) -> Option<&str> {
    let image = mount.image.as_ref()?.image.as_str();
    Some(image).filter(|image| !image.is_empty())
}

fn check_image(mount: &CriMount) -> Result<(), SpecFault> {
    let field = "mounts.image";
    if !mount.host_path.is_empty() {
        return Err(SpecFault::invalid(field, "it contradicts host_path"));
    }
    if !mount.readonly {
        return Err(SpecFault::invalid(
            field,
            "an image is mounted read-only: set readonly",
        ));
    }
    match MountPropagation::try_from(mount.propagation) {
        // Never any mounts to propagate in an image.
        Ok(MountPropagation::PropagationPrivate | MountPropagation::PropagationHostToContainer) => {
            Ok(())
        }
        Ok(MountPropagation::PropagationBidirectional) | Err(_) => Err(SpecFault::invalid(
            field,
            "an image propagates no mounts: use None or HostToContainer",
        )),
    }
}

pub(super) fn mounts(
    request: &SpecRequest<'_>,
    is_privileged: bool,
) -> Result<Vec<Mount>, SpecFault> {
    let is_taken = |mount: &Mount| {
        let destination = mount.destination();
        let same = |volume: &Volume| absolute(&volume.destination) == *destination;
        request.volumes.iter().any(same)
    };
    let mut mounts = default_mounts()?;
    mounts.retain(|mount| !is_taken(mount));
    for mount in &mut mounts {
        if mount.destination() == Path::new(SHARED_MEMORY) {
            // POSIX shared memory is shared by the pod.
            *mount = MountBuilder::default()
                .destination(SHARED_MEMORY)
                .typ("bind")
                .source(SHARED_MEMORY)
                .options(options(&["rbind", "nosuid", "noexec", "nodev"]))
                .build()?;
        }
        if is_privileged {
            let kept = mount
                .options()
                .iter()
                .flatten()
                .filter(|option| *option != "ro");
            let kept: Vec<String> = kept.cloned().collect();
            mount.set_options(Some(kept));
        }
    }
    let mut volumes: Vec<&Volume> = request.volumes.iter().collect();
    // A volume within another one is mounted after it.
    volumes.sort_by_key(|volume| absolute(&volume.destination).components().count());
    for volume in volumes {
        let propagation = if volume.is_slave {
            "rslave"
        } else {
            "rprivate"
        };
        let access = if volume.readonly { "ro" } else { "rw" };
        let asked = volume.asked;
        let mut shared = options(&["rbind", propagation, access]);
        shared.extend(guest_options(volume.flags | asked).map(str::to_owned));
        // Volumes are mounted so in guests; the option covers what is mounted below, too.
        let no_devices = asked.contains(StatVfsMountFlags::NODEV);
        shared.extend(no_devices.then(|| "rnodev".to_owned()));
        let mount = MountBuilder::default()
            .destination(absolute(&volume.destination))
            .typ("bind");
        let mount = match &volume.source {
            VolumeSource::Shared(name) => mount
                .source(Path::new(SHARED_DIR).join(name))
                .options(shared),
            // The agent puts the image's files into it.
            VolumeSource::Filled(name) => {
                shared.push(FILL.to_owned());
                mount
                    .source(Path::new(SHARED_DIR).join(name))
                    .options(shared)
            }
            VolumeSource::Memory(memory) => {
                shared.extend(memory_options(memory));
                mount.source(memory_source(memory)).options(shared)
            }
            VolumeSource::Device(path) => {
                let mut all = options(&["bind", access, "nosuid", "noexec"]);
                all.extend(no_devices.then(|| "nodev".to_owned()));
                mount.source(*path).options(all)
            }
            // Programs in it may be executed, as Kubernetes requires, but without setuid.
            VolumeSource::Image { digest, below } => {
                let below = (!below.is_empty()).then_some(below.as_str());
                let source = image_source(digest, below).ok_or_else(|| {
                    SpecFault::invalid("mounts.image", format!("{digest:?} is not a digest"))
                })?;
                let mut all = options(&["bind", "ro", "nosuid", "nodev"]);
                let no_programs = asked.contains(StatVfsMountFlags::NOEXEC);
                all.extend(no_programs.then(|| "noexec".to_owned()));
                mount.source(source).options(all)
            }
        };
        mounts.push(mount.build()?);
    }
    Ok(mounts)
}

/// Returns the mount source by which the agent recognizes a volume in memory.
fn memory_source(memory: &MemorySource) -> String {
    let (key, below) = (&*memory.key.to_string(), memory.below.as_deref());
    MountSource::Memory { key, below }.to_string()
}

/// Returns the mount options from which the agent creates the volume.
fn memory_options(memory: &MemorySource) -> impl Iterator<Item = String> {
    let size = memory.size.map(|size| format!("size={size}"));
    let mode = format!("mode={:o}", memory.mode);
    let owner = [format!("uid={}", memory.uid), format!("gid={}", memory.gid)];
    size.into_iter().chain([mode]).chain(owner)
}

fn options(list: &[&str]) -> Vec<String> {
    list.iter().map(|option| (*option).to_owned()).collect()
}

/// Relative paths start at the root, as in other runtimes.
fn absolute(path: &str) -> std::path::PathBuf {
    Path::new("/").join(path)
}
