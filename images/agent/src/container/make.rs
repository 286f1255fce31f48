//! Creation of containers and additional processes, in the order that the module's documentation
//! gives.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock};

use libcontainer::container::State;
use oci_spec::runtime::{Process as SpecProcess, Spec, User as SpecUser};
use podvisor_agent_protocol::api;

use super::error::{ContainerError, Result};
use super::execs::Execs;
use super::files::directory::{Directory, remove_directory};
use super::files::fill::fill;
use super::files::nodes::Nodes;
use super::files::rootfs::{Image, MountPoint, Rootfs};
use super::files::submounts::Held;
use super::files::{disk, rootfs};
use super::lock::lock;
use super::process::Process;
use super::process::launch::{Launcher, Streams};
use super::process::turns::ContainerTurns;
use super::resources;
use super::spec::{self, EtcFile, VolumeOfImage};
use super::table::{Container, Containers, Shared};
use super::users::namespace::{IdKind, IdMaps, UserNamespace};
use super::users::own::{ExecUser, OwnUser};
use super::users::user::Databases;
use crate::cgroup::Cgroup;
use crate::cgroup::devices::DeviceFilter;
use crate::launcher::{Confinement, NewProcess, UserEntry};
use crate::owner::Owner;

/// The plan of a container, before anything of it exists.
struct Plan {
    order: u64,
    /// The agent's short name.
    name: String,
    cgroup: Cgroup,
    streams: Streams,
    spec: Spec,
    devices: Option<DeviceFilter>,
    users: Option<Arc<UserNamespace>>,
}

/// Everything that a container consists of, with its process ready to be started. Fields drop in
/// order: mounts in the directory are dropped before the directory.
struct ContainerParts {
    first: FirstProcess,
    held: Held,
    bound: Vec<MountPoint>,
    volumes: Vec<Arc<Image>>,
    rootfs: Rootfs,
    directory: Directory,
}

/// How a container's own process starts.
#[derive(Default)]
struct FirstProcess {
    user: SpecUser,
    confinement: Option<Confinement>,
}

impl Containers {
    /// Creates a container; after a failure, nothing of it is left.
    pub(super) async fn make(
        &self,
        order: u64,
        request: &api::CreateContainerRequest,
    ) -> Result<Container> {
        let mut plan = self.plan(order, request).await?;
        let files = self.prepare_files(request, &mut plan).await?;
        self.start_init(request, plan, files).await
    }

    /// Parses the request, and puts the guest's ids and devices into its specification.
    async fn plan(&self, order: u64, request: &api::CreateContainerRequest) -> Result<Plan> {
        let default_stdio = api::Stdio::default();
        let streams = Streams::new(request.stdio.as_ref().unwrap_or(&default_stdio))?;
        let mut spec = spec::parse(&request.spec_json)?;
        let users = match IdMaps::take(&mut spec)? {
            Some(maps) => Some(self.shared.users.get(maps, &self.shared.reaper).await?),
            None => None,
        };
        let linux = spec.linux_mut().as_mut();
        if let Some(resources) = linux.and_then(|linux| linux.resources_mut().as_mut()) {
            resources::keep_what_is_there(resources);
        }
        let mut devices = request.devices.clone();
        if let Some(maps) = users.as_ref().map(|users| users.maps()) {
            maps.translate(&mut spec)?;
            for device in &mut devices {
                device.uid = maps.id(IdKind::User, device.uid)?;
                device.gid = maps.id(IdKind::Group, device.gid)?;
            }
        }
        let mut nodes = Nodes::find(&devices, request.guest_devices).await?;
        nodes.allow(&mut spec);
        let devices = spec.linux().as_ref().map(DeviceFilter::new).transpose()?;
        nodes.show(&mut spec);
        disk::validate_serial(&request.image_serial).map_err(rootfs::RootfsError::from)?;
        let name = format!("c{order}");
        Ok(Plan {
            order,
            cgroup: Cgroup::new(&name),
            name,
            streams,
            spec,
            devices,
            users,
        })
    }

    /// Mounts the container's file systems and writes its bundle.
    async fn prepare_files(
        &self,
        request: &api::CreateContainerRequest,
        plan: &mut Plan,
    ) -> Result<ContainerParts> {
        let Shared {
            base,
            reaper,
            images,
            memory,
            submounts,
            pids,
            ..
        } = &*self.shared;
        let users = plan.users.clone();
        let users = users.as_deref();
        let maps = users.map(UserNamespace::maps);
        let spec = &mut plan.spec;
        let directory = create_directory(base.join(&plan.name))?;
        let image = images
            .get(&request.image_serial, &base.join("images"))
            .await?;
        let rootfs = Rootfs::create(image, &directory.path, users)?;
        let mut volumes = Vec::new();
        for serial in spec::mounted_images(spec) {
            volumes.push(images.get(&serial, &base.join("images")).await?);
        }
        let (mut bound, places) = place_of(&volumes, users, &directory)?;

        let databases = Databases::read(rootfs.path())?;
        let user = (!request.user.is_empty())
            .then(|| databases.resolve(&request.user, request.supplemental_groups.into()))
            .transpose()?;
        let shared = || {
            pids.path(reaper).map_err(|source| ContainerError::Io {
                action: "make the shared pid namespace",
                source,
            })
        };
        spec::join_pids(spec, shared, |id| self.pids_of(id))?;
        spec::place_images(spec, |serial| {
            let number = volumes.iter().position(|image| image.serial() == serial)?;
            places.get(number).cloned()
        })?;
        let held = submounts.hold(spec::shared_volumes(spec)).await;
        let of_image = spec::take_volumes_of_image(spec);
        fill_volumes(rootfs.path(), of_image, maps.map(IdMaps::root)).await?;
        bound.extend(memory.place(spec.mounts_mut().as_mut(), base, &directory.path, maps)?);
        spec::place(spec, rootfs.path(), request.readonly_rootfs, &plan.cgroup);
        let etc = etc_files(request);
        spec::show_files(spec, &rootfs.etc_directory(), &etc, maps.map(IdMaps::root))?;
        let filter = spec::store_filter(spec::take_filter(spec)?, &directory.path)?;
        let takes_dev = spec::has_own_dev(spec);
        let mut first = FirstProcess::default();
        if let Some(process) = spec.process_mut() {
            let home = |uid| databases.home_of(uid);
            spec::complete_process(process, user, home, plan.streams.is_terminal());
            // The root may be read-only later. A directory that a volume hides, or leads to, is
            // created then.
            if let Err(error) = rootfs.make_dir(process.cwd()) {
                tracing::debug!(%error, "cannot prepare the working directory");
            }
            first.user = process.user().clone();
            let entry = entry(users, process, EntryKind::First { takes_dev })?;
            first.confinement = Some(Confinement::take_own(process, filter, entry));
        }
        spec::store(spec, directory.path.join(UNRESOLVED))?;
        write_bundle(spec, &rootfs, &directory.path)?;
        Ok(ContainerParts {
            first,
            held,
            bound,
            volumes,
            rootfs,
            directory,
        })
    }

    /// Creates the control group, and has libcontainer create the process.
    async fn start_init(
        &self,
        request: &api::CreateContainerRequest,
        plan: Plan,
        files: ContainerParts,
    ) -> Result<Container> {
        let FirstProcess { user, confinement } = files.first;
        let groups = request.supplemental_groups.into();
        let user = OwnUser::new(request.user.clone(), groups, user);
        let state = self.shared.base.join("state");
        let turns = ContainerTurns::default();
        let launcher = Launcher {
            launches: &self.shared.launches,
            turns: &turns,
            reaper: &self.shared.reaper,
            hub: &self.shared.hub,
            name: &plan.name,
            state: state.clone(),
            directory: files.directory.path.clone(),
            uid: guest_uid(plan.users.as_deref(), user.ids().uid())?,
            confinement: confinement.clone(),
        };
        let made = async {
            make_group(&plan.cgroup, plan.devices.as_ref())?;
            let kind = NewProcess::Create {
                bundle: files.directory.path.clone(),
            };
            Ok::<_, ContainerError>(launcher.make(kind, plan.streams).await?)
        };
        match made.await {
            Ok(init) => Ok(Container {
                order: plan.order,
                cgroup: plan.cgroup,
                devices: plan.devices,
                oom_kills_before: 0,
                was_oom_killed: OnceLock::new(),
                init,
                cleanup: Mutex::default(),
                confinement,
                started: Mutex::default(),
                turns,
                execs: Execs::default(),
                user,
                users: plan.users,
                rootfs: Mutex::new(Some(files.rootfs)),
                volumes: Mutex::new(files.volumes),
                bound: Mutex::new(files.bound),
                held: Mutex::new(files.held),
                directory: Arc::new(files.directory),
                name: plan.name,
            }),
            Err(error) => {
                // Removes what the launcher may have left.
                if let Err(error) = plan.cgroup.destroy().await {
                    tracing::warn!(name = %plan.name, %error, "cannot remove a control group");
                }
                remove_directory(&state.join(&plan.name));
                Err(error)
            }
        }
    }

    /// Returns the path with which the pid namespace of a container's process is joined.
    fn pids_of(&self, id: &str) -> Result<PathBuf> {
        let container = self.get(id)?;
        if container.init.has_ended() {
            return Err(ContainerError::WrongState {
                id: id.to_owned(),
                state: "not running, its processes cannot be joined",
            });
        }
        Ok(PathBuf::from(format!(
            "/proc/{}/ns/pid",
            container.init.pid()
        )))
    }

    /// Creates an additional process of a container.
    pub(super) async fn make_exec(
        &self,
        container: &Container,
        request: &api::ExecProcessRequest,
    ) -> Result<Process> {
        let default_stdio = api::Stdio::default();
        let streams = Streams::new(request.stdio.as_ref().unwrap_or(&default_stdio))?;
        let mut process = spec::parse_process(&request.process_json)?;
        let ExecUser { user, databases } = {
            let rootfs = lock(&container.rootfs);
            let rootfs = rootfs.as_ref().ok_or(ContainerError::WrongState {
                id: request.container_id.clone(),
                state: "being deleted",
            })?;
            let groups = request.supplemental_groups.into();
            let own = &container.user;
            own.of_exec(rootfs.path(), &request.user, groups)?
        };
        let home = |uid| databases.home_of(uid);
        spec::complete_process(&mut process, user, home, streams.is_terminal());
        let directory = create_directory(
            container
                .directory
                .path
                .join(format!("exec-{}", request.exec_id)),
        )?;
        let uid = container.guest_uid(process.user().uid())?;
        let filter = spec::stored_filter(&container.directory.path);
        let entry = entry(container.users.as_deref(), &process, EntryKind::Further)?;
        let confinement = Confinement::take(&mut process, filter, entry);
        let path = spec::store(&process, directory.path.join("process.json"))?;
        let launcher = Launcher {
            launches: &self.shared.launches,
            turns: &container.turns,
            reaper: &self.shared.reaper,
            hub: &self.shared.hub,
            name: &container.name,
            state: states_of_exec(&directory, &container.name, &self.state_of(container))?,
            // Not the exec's own directory, whose name can be too long for a socket.
            directory: container.directory.path.clone(),
            uid,
            confinement,
        };
        let kind = NewProcess::Exec {
            process: path,
            init: container.init.pid(),
        };
        Ok(launcher.make(kind, streams).await?)
    }
}

/// File of a container's specification before the destinations of its mounts are resolved, in its
/// directory.
const UNRESOLVED: &str = "spec.json";

/// Writes a container's bundle for libcontainer.
fn write_bundle(spec: &mut Spec, rootfs: &Rootfs, directory: &Path) -> Result<()> {
    spec::resolve_destinations(spec, rootfs.path())?;
    rootfs.make_parents(&spec::destinations(spec));
    spec::store(spec, directory.join("config.json"))?;
    Ok(())
}

/// Writes a container's bundle again: its process may have changed the links that lead to the
/// destinations of its mounts.
pub(super) fn rewrite_bundle(container: &Container) -> Result<()> {
    let directory = &container.directory.path;
    match &*lock(&container.rootfs) {
        Some(rootfs) => {
            let mut spec = spec::stored(directory.join(UNRESOLVED))?;
            write_bundle(&mut spec, rootfs, directory)
        }
        None => Ok(()),
    }
}

/// Returns the files of `/etc` that are the container's and not its image's.
fn etc_files(request: &api::CreateContainerRequest) -> [EtcFile<'_>; 3] {
    [
        EtcFile {
            destination: "/etc/hosts",
            contents: &request.etc_hosts,
        },
        EtcFile {
            destination: "/etc/hostname",
            contents: &request.etc_hostname,
        },
        EtcFile {
            destination: "/etc/resolv.conf",
            contents: &request.etc_resolv_conf,
        },
    ]
}

/// Creates a container's control group. It exists before libcontainer runs, so that no process is
/// ever in it without its rules for devices.
pub(super) fn make_group(cgroup: &Cgroup, devices: Option<&DeviceFilter>) -> Result<()> {
    cgroup.create().map_err(|source| ContainerError::Io {
        action: "create a control group",
        source,
    })?;
    if let Some(devices) = devices {
        devices.attach(cgroup.path())?;
    }
    Ok(())
}

fn create_directory(path: PathBuf) -> Result<Directory> {
    Directory::create(path).map_err(|source| ContainerError::Io {
        action: "create a directory",
        source,
    })
}

/// Creates a directory of libcontainer's states for one exec, with the state of its container.
/// libcontainer creates a socket next to that for each exec, which is removed with the exec's
/// directory.
fn states_of_exec(directory: &Directory, name: &str, state: &Path) -> Result<PathBuf> {
    let own = directory.path.join(name);
    fs::create_dir(&own)
        .and_then(|()| fs::hard_link(State::file_path(state), State::file_path(&own)))
        .map_err(|source| ContainerError::Io {
            action: "show the container's state to an exec",
            source,
        })?;
    Ok(directory.path.clone())
}

/// Copies the content of the image at the paths of its volumes into them, on a thread for blocking
/// work.
async fn fill_volumes(
    rootfs: &Path,
    volumes: Vec<VolumeOfImage>,
    owner: Option<Owner>,
) -> Result<()> {
    if volumes.is_empty() {
        return Ok(());
    }
    let rootfs = rootfs.to_owned();
    let filled = tokio::task::spawn_blocking(move || {
        let mut volumes = volumes.iter();
        volumes.try_for_each(|volume| fill(&rootfs, &volume.destination, &volume.source, owner))
    });
    filled.await.map_err(|error| ContainerError::Io {
        action: "fill the volumes of the image",
        source: io::Error::other(error),
    })??;
    Ok(())
}

/// Returns where the images of a container's volumes are mounted, and the mounts that were created
/// for that.
fn place_of(
    volumes: &[Arc<Image>],
    users: Option<&UserNamespace>,
    directory: &Directory,
) -> Result<(Vec<MountPoint>, Vec<PathBuf>)> {
    let mut mapped = Vec::new();
    let mut places = Vec::new();
    for (number, image) in volumes.iter().enumerate() {
        match users {
            Some(users) => {
                let target = directory.path.join(format!("image-{number}"));
                let mount = image.map(users, target)?;
                places.push(mount.path().to_owned());
                mapped.push(mount);
            }
            None => places.push(image.path().to_owned()),
        }
    }
    Ok((mapped, places))
}

/// Returns the guest's id of a user of a container.
fn guest_uid(users: Option<&UserNamespace>, uid: u32) -> Result<u32> {
    Ok(match users {
        Some(users) => users.maps().id(IdKind::User, uid)?,
        None => uid,
    })
}

/// The kind of a container's process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum EntryKind {
    /// Its own, for which mounts are created.
    First {
        /// Whether a /dev is among them.
        takes_dev: bool,
    },
    /// One that joins it.
    Further,
}

/// Returns how a process gets into its user namespace, which must map all of its ids.
fn entry(
    users: Option<&UserNamespace>,
    process: &SpecProcess,
    kind: EntryKind,
) -> Result<Option<UserEntry>> {
    let Some(users) = users else { return Ok(None) };
    let (maps, user) = (users.maps(), process.user());
    let uid = maps.id(IdKind::User, user.uid())?;
    let groups = user.additional_gids().iter().flatten();
    for gid in groups.chain([&user.gid()]) {
        maps.id(IdKind::Group, *gid)?;
    }
    Ok(Some(UserEntry {
        namespace: users.path(),
        owns_mounts: kind != EntryKind::Further,
        dev: (kind == EntryKind::First { takes_dev: true }).then(|| maps.root()),
        uid,
    }))
}

impl Container {
    /// Returns the guest's id of a user of the container.
    pub(super) fn guest_uid(&self, uid: u32) -> Result<u32> {
        guest_uid(self.users.as_deref(), uid)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use libcontainer::container::{Container as LibContainer, ContainerStatus};

    use super::*;

    fn names(path: &Path) -> Vec<String> {
        let entries = fs::read_dir(path).unwrap();
        let name = |entry: fs::DirEntry| entry.file_name().into_string().unwrap();
        entries.map(|entry| name(entry.unwrap())).collect()
    }

    #[test]
    fn what_libcontainer_leaves_of_an_exec_goes_with_its_directory() {
        let base = tempfile::tempdir().unwrap();
        let state = base.path().join("state/c1");
        fs::create_dir_all(&state).unwrap();
        let pid = i32::try_from(std::process::id()).unwrap();
        let running = ContainerStatus::Running;
        let container = LibContainer::new("c1", running, Some(pid), base.path(), &state).unwrap();
        container.save().unwrap();

        let directory = Directory::create(base.path().join("c1/exec-1")).unwrap();
        let states = states_of_exec(&directory, "c1", &state).unwrap();
        let shown = LibContainer::load(states.join("c1")).unwrap();
        assert!(shown.can_exec());
        assert_eq!(shown.pid(), container.pid());
        UnixListener::bind(shown.root.join("tenant-notify-1.sock")).unwrap();
        drop(directory);
        assert!(names(&base.path().join("c1")).is_empty());
        assert_eq!(names(&state), ["state.json"]);
    }
}
