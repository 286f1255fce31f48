//! Creates a container: its record, volumes and specification, then the container in the guest. If
//! one of them fails, all are undone.

use std::collections::BTreeMap;
use std::fs::File;
use std::sync::Arc;

use podvisor_cri_messages::{
    ContainerConfig, ContainerEventType, CreateContainerRequest, Mount, NamespaceMode,
};
use podvisor_images::{Error as ImageError, Image, parse_reference};
use rustix::fs::StatVfsMountFlags;
use rustix::io::Errno;
use tracing::{debug, info, warn};

use super::request::{Settings, check, log_path};
use crate::blocking::{apart, in_place};
use crate::cni;
use crate::cri::error::{CriError, ObjectKind, Result};
use crate::cri::node::{Container, Node, Pod, now};
use crate::cri::spec::{self, ContainerSpec, SpecRequest, Volume, VolumeSource};
use crate::cri::state::{ContainerPhase, ContainerRecord, MountedImage, PodPhase, PodRecord};
use crate::cri::{cdi, devices, memory_volumes, resolver, volumes};
use crate::sandbox::{
    CreateContainer, GuestContainer, ImageVolume, RefusalKind, RestartPolicy, SandboxClient,
    SandboxError, SharedDirectory, random_id,
};
use crate::signal;

/// Signal that asks a process to end: SIGTERM.
const SIGTERM: u32 = 15;

impl Node {
    /// CreateContainer.
    pub(in crate::cri) async fn create_container(
        self: &Arc<Self>,
        request: CreateContainerRequest,
    ) -> Result<String> {
        let pod = self.settled_pod(&request.pod_sandbox_id).await?;
        let config = request.config.clone().unwrap_or_default();
        let settings = Settings::of(&config)?;
        let metadata = config.metadata.clone().unwrap_or_default();
        let name = format!("{}_{}_{}", pod.id, metadata.name, metadata.attempt);
        let node = Arc::clone(self);
        let work = || async move {
            // In here, so that an equal request waits for the one that looks at the node's files.
            let (config, settings) = node.with_cdi_devices(config, settings).await?;
            check(&config, spec::users_of(&pod.record().config)?)?;
            node.make_container(&pod, config, settings).await
        };
        let node = Arc::clone(self);
        // A kubelet whose deadline has expired sends a different request: its termination log has a
        // new name each time.
        let undo = |id: String| async move { node.remove_unclaimed(&id).await };
        let made = self
            .container_flights
            .join_or_undo(&name, request, work, undo);
        match made.await {
            Some(made) => made,
            None => Err(CriError::NameTaken {
                kind: ObjectKind::Container,
                name: metadata.name,
                id: "another request".to_owned(),
            }),
        }
    }

    /// Returns a container's configuration with the CDI devices that it names.
    async fn with_cdi_devices(
        &self,
        config: ContainerConfig,
        mut settings: Settings,
    ) -> Result<(ContainerConfig, Settings)> {
        if !cdi::is_asked_for(&config) {
            return Ok((config, settings));
        }
        let mounts = config.mounts.len();
        let directories = self.config.cdi_spec_dirs.clone();
        let add = move || cdi::add_devices(&directories, config);
        // A path of the node may be on a file server that does not answer.
        let added = apart("cdi", add).await;
        let added = added.map_err(CriError::host("read CDI specifications"))??;
        settings.add_mount_flags(mounts, added.mount_flags);
        Ok((added.config, settings))
    }

    /// Removes a container whose caller did not learn its id.
    async fn remove_unclaimed(self: &Arc<Self>, id: &str) {
        let Ok(container) = self.container(id) else {
            return;
        };
        match self.remove_container_now(&container).await {
            Ok(()) => info!(container = id, "removed a container whose caller went away"),
            Err(error) => {
                warn!(container = id, %error, "failed to remove a container whose caller went away")
            }
        }
    }

    async fn make_container(
        self: &Arc<Self>,
        pod: &Arc<Pod>,
        mut config: ContainerConfig,
        settings: Settings,
    ) -> Result<String> {
        // The turn keeps the pod from being stopped in between.
        let _turn = pod.turn.lock().await;
        if pod.phase() != PodPhase::Ready {
            return Err(pod.not_ready());
        }
        if pod.is_vm() {
            return self.create_vm(pod, config).await;
        }
        self.target(pod, &mut config)?;
        let id = random_id().map_err(CriError::host("make up an id"))?;
        let shared = self.dir(&pod.id).join(volumes::SHARED);
        let made = async {
            let wanted = config.image.as_ref();
            let wanted = wanted.map_or("", |image| image.image.as_str());
            let (image, rootfs, of_images, declared) = in_place(|| -> Result<_> {
                let image = self.image_named(wanted)?;
                let rootfs = image.open_rootfs()?;
                let of_images = self.image_volumes(&config, &settings);
                let of_images = of_images.map_err(|error| CriError::ImageVolume(error.into()))?;
                let settings = image.config().config().as_ref();
                let declared = self.make_image_volumes(pod, &id, settings, &config.mounts)?;
                Ok((image, rootfs, of_images, declared))
            })?;
            let all = [config.mounts.as_slice(), &declared].concat();
            // A file server that does not answer must not delay the pod's end, nor the recording of
            // its machine's end.
            let client = pod.client()?;
            let in_guest = self.shared_directory(pod, &client)?;
            let looked = tokio::select! {
                looked = self.look_at_volumes(pod, &in_guest, all) => looked?,
                () = pod.is_to_end() => return Err(pod.not_ready()),
                _ = client.machine_ended() => return Err(pod.not_ready()),
            };
            let mounted = in_place(|| volumes::mount(&in_guest, &pod.mounted, &id, looked));
            let mut mounted =
                mounted.inspect_err(|error| self.end_for_host_users(pod, &client, error))?;
            settings.restrict(&config.mounts, &mut mounted);
            let of_root = mounted.split_off(mounted.len().saturating_sub(declared.len()));
            mounted.extend(of_root.into_iter().map(Volume::filled));
            mounted.extend(of_images.volumes);
            let images = Images {
                rootfs,
                volumes: of_images.open,
            };
            let new = NewContainer {
                id: &id,
                config,
                image,
                mounted,
                mounted_images: of_images.known,
                stop_signal: settings.stop_signal,
            };
            self.create_in_guest(pod, new, images).await
        }
        .await;
        if made.is_err() {
            let released = in_place(|| volumes::release(&shared, &pod.mounted, &id));
            let removed = match released {
                Ok(()) => self.remove_image_volumes(&pod.id, &id).await,
                Err(error) => Err(error),
            };
            if let Err(error) = removed {
                // They are unmounted with the pod.
                warn!(container = id, %error, "failed to unmount volumes after a failed create");
            }
        }
        made?;
        info!(container = id, pod = pod.id, "the container is created");
        Ok(id)
    }

    async fn create_in_guest(
        self: &Arc<Self>,
        pod: &Arc<Pod>,
        new: NewContainer<'_>,
        images: Images,
    ) -> Result<()> {
        let id = new.id;
        let pod_record = pod.record();
        let hostname = resolver::hostname(&pod_record.config)?;
        let spec = spec::container_spec(&SpecRequest {
            id,
            hostname: &hostname,
            container: &new.config,
            image: new.image.config().config().as_ref(),
            volumes: &new.mounted,
            users: spec::users_of(&pod_record.config)?,
        })?;
        let record = container_record(&pod_record, &new, &spec)?;
        let create = self.create_request(&pod_record, &record, spec, images)?;
        let client = pod.client()?;
        let container = Container::new(record, Arc::clone(pod));
        self.add_new_container(&container)?;
        let make = async {
            container.write(&self.database)?;
            self.make_room(pod, None).await?;
            let (identity, start_error) = match client.create_container(create).await {
                Ok(user) => (Some(user), None),
                // As in other runtimes, an invalid process is reported at start, so that the pod's
                // restart policy applies.
                Err(error) if is_of_process(&error) => {
                    self.undo_in_guest(&client, id).await;
                    (None, Some(error.to_string()))
                }
                Err(error) => return Err(error.into()),
            };
            container.update(&self.database, |record| {
                record.phase = ContainerPhase::Created;
                record.identity = identity;
                record.start_error = start_error;
            })
        };
        let made = tokio::select! {
            made = make => made,
            () = pod.is_to_end() => {
                // Its remains go away with the machine.
                self.delete_failed_record(&container);
                return Err(pod.not_ready());
            }
        };
        if let Err(error) = made {
            self.undo_in_guest(&client, id).await;
            self.delete_failed_record(&container);
            self.give_back(pod, None).await;
            return Err(error);
        }
        if let Err(error) = in_place(|| self.store.note_use(&new.image)) {
            debug!(%error, "the use of the image is not noted");
        }
        self.set_importance(pod);
        self.watch_pressure(pod);
        self.emit(&container, ContainerEventType::ContainerCreatedEvent);
        Ok(())
    }

    /// Deletes a container whose creation failed. If it cannot be deleted now, it becomes visible
    /// for the kubelet to remove: otherwise it would occupy its name invisibly.
    pub(in crate::cri) fn delete_failed_record(self: &Arc<Self>, container: &Arc<Container>) {
        if let Err(error) = self.forget_container(container) {
            warn!(
                container = container.id,
                %error,
                "failed to delete the record after a failed create"
            );
            self.note_container(container, |record| record.phase = ContainerPhase::Removing);
        }
    }

    /// Returns the request for the guest. Opens the container's devices.
    fn create_request(
        &self,
        pod: &PodRecord,
        record: &ContainerRecord,
        spec: ContainerSpec,
        images: Images,
    ) -> Result<CreateContainer> {
        let config = &record.config;
        let hostname = resolver::hostname(&pod.config)?;
        let is_privileged = is_privileged(config);
        Ok(CreateContainer {
            config: GuestContainer {
                id: record.id.clone(),
                readonly_rootfs: spec.readonly_rootfs,
                spec: spec.spec,
                user: spec.user,
                supplemental_groups: spec.groups,
                guest_devices: is_privileged,
                etc_hosts: cni::resolver::hosts(&hostname, &pod.addresses),
                etc_resolv_conf: resolver::resolv_conf(
                    pod.config.dns_config.as_ref(),
                    &self.cni.dns(&pod.id)?,
                )?,
                etc_hostname: format!("{hostname}\n").into_bytes(),
            },
            image: images.rootfs.into(),
            image_digest: record.image.clone(),
            volumes: images.volumes,
            // It is passed when the container is started.
            log: None,
            tty: config.tty,
            stdin: config.stdin,
            // Whoever was attached to a terminal may come back to it.
            stdin_once: config.stdin && config.stdin_once && !config.tty,
            restart: RestartPolicy::Never,
            devices: in_place(|| devices::open(&config.devices, is_privileged))?,
        })
    }

    /// Removes from the guest what exists of a container that was not created or not started.
    pub(in crate::cri) async fn undo_in_guest(&self, client: &SandboxClient, id: &str) {
        if let Err(error) = client.delete_container(id).await {
            debug!(container = id, %error, "nothing of the container to delete in the guest");
        }
    }

    /// Returns the directory that a pod's guest shares, as it is where volumes are mounted in it.
    pub(in crate::cri) fn shared_directory(
        &self,
        pod: &Pod,
        client: &SandboxClient,
    ) -> Result<Arc<SharedDirectory>> {
        let found = client.shared_directory(&self.dir(&pod.id).join(volumes::SHARED));
        found
            .map(Arc::new)
            .map_err(|error| match Errno::from_io_error(&error) {
                // The process has ended.
                Some(Errno::NOENT | Errno::SRCH) => pod.not_ready(),
                _ => CriError::host("look at the mounts of the pod's process")(error),
            })
    }

    /// Opens the host's files that a container mounts, and decides which of them are in its guest's
    /// memory.
    async fn look_at_volumes(
        &self,
        pod: &Arc<Pod>,
        shared: &Arc<SharedDirectory>,
        mounts: Vec<Mount>,
    ) -> Result<volumes::ResolvedVolumes> {
        let before = pod.record().memory_volumes;
        let mut known = before.clone();
        let shared = Arc::clone(shared);
        let of_pod = Arc::clone(pod);
        let look = move || -> Result<_> {
            let in_memory = match &mut known {
                Some(known) => memory_volumes::sources(&mounts, known)?,
                None => BTreeMap::new(),
            };
            let looked = volumes::look(&shared, &of_pod.mounted, &mounts, in_memory)?;
            Ok((looked, known))
        };
        let looked = apart("volumes", look).await;
        let (looked, known) = looked.map_err(CriError::host("look at the volumes"))??;
        if known != before {
            // Recorded before there is a container that may write to one.
            pod.update(&self.database, |record| record.memory_volumes = known)?;
        }
        Ok(looked)
    }

    /// Returns the images that a container mounts as volumes.
    fn image_volumes(&self, config: &ContainerConfig, settings: &Settings) -> Result<ImageMounts> {
        let mut all = ImageMounts::default();
        for (number, mount) in config.mounts.iter().enumerate() {
            let Some(name) = spec::mounts::image_of(mount) else {
                continue;
            };
            let image = self.image_named(name)?;
            let digest = image.id().to_string();
            let sub_path = settings.image_sub_paths.get(number);
            let sub_path = sub_path.cloned().unwrap_or_default();
            if all.open.iter().all(|other| other.digest != digest) {
                all.open.push(ImageVolume {
                    image: image.open_rootfs()?.into(),
                    digest: digest.clone(),
                });
            }
            all.known.push(MountedImage {
                mount: number,
                id: digest.clone(),
                sub_path: sub_path.clone(),
            });
            all.volumes.push(Volume {
                source: VolumeSource::Image {
                    digest,
                    below: sub_path,
                },
                destination: mount.container_path.clone(),
                readonly: true,
                is_slave: false,
                flags: StatVfsMountFlags::empty(),
                asked: settings.mount_flags(number),
            });
        }
        Ok(all)
    }

    /// Resolves the container whose processes another one joins (`kubectl debug --target`) to its
    /// full id.
    fn target(&self, pod: &Pod, config: &mut ContainerConfig) -> Result<()> {
        let linux = config.linux.as_mut();
        let security = linux.and_then(|linux| linux.security_context.as_mut());
        let options = security.and_then(|security| security.namespace_options.as_mut());
        let Some(options) = options else {
            return Ok(());
        };
        if options.pid != i32::from(NamespaceMode::Target) {
            return Ok(());
        }
        let field = "namespace_options.target_id";
        if options.target_id.is_empty() {
            let reason = "the mode TARGET names a container";
            return Err(CriError::invalid(field, reason));
        }
        let target = self.container(&options.target_id)?;
        if target.pod.id != pod.id {
            return Err(CriError::invalid(field, "it is in another pod"));
        }
        target.running()?;
        options.target_id.clone_from(&target.id);
        Ok(())
    }

    /// Returns the image by id or name; it must be on this node.
    fn image_named(&self, name: &str) -> Result<Image> {
        match self.store.resolve(name) {
            Err(ImageError::NotFound { .. }) => Err(CriError::NoImage {
                name: name.chars().take(512).collect(),
            }),
            found => Ok(found?),
        }
    }
}

/// A container to be created, with its volumes mounted.
struct NewContainer<'a> {
    id: &'a str,
    config: ContainerConfig,
    image: Image,
    mounted: Vec<Volume>,
    mounted_images: Vec<MountedImage>,
    /// Linux' signal number; `None` for the image's.
    stop_signal: Option<u32>,
}

/// The images that a container mounts as volumes.
#[derive(Default)]
struct ImageMounts {
    volumes: Vec<Volume>,
    /// Each image once.
    open: Vec<ImageVolume>,
    /// Their part of the record.
    known: Vec<MountedImage>,
}

/// A container's images, open, so that they cannot be removed while the guest uses them.
struct Images {
    rootfs: File,
    volumes: Vec<ImageVolume>,
}

/// Returns the record of a container before it is created in the guest.
fn container_record(
    pod: &PodRecord,
    new: &NewContainer<'_>,
    spec: &ContainerSpec,
) -> Result<ContainerRecord> {
    let (image, config) = (&new.image, &new.config);
    let settings = image.config().config().as_ref();
    let of_image = settings.and_then(|settings| settings.stop_signal().as_deref());
    let of_image = of_image.and_then(|text| signal::parse(text).ok());
    let names = new.mounted.iter().filter_map(Volume::name);
    Ok(ContainerRecord {
        id: new.id.to_owned(),
        pod: pod.id.clone(),
        image: image.id().to_string(),
        image_ref: image_ref(image),
        stop_signal: new
            .stop_signal
            .unwrap_or(of_image.map_or(SIGTERM, u32::from)),
        log_path: log_path(&pod.config.log_directory, &config.log_path)?,
        volumes: names.map(str::to_owned).collect(),
        identity: None,
        image_tag: image_tag(image, config),
        start_error: None,
        mounted_images: new.mounted_images.clone(),
        exit_before_removal: None,
        vm: None,
        process: spec.spec.process().clone().unwrap_or_default(),
        user: spec.user.clone(),
        groups: spec.groups,
        created_at: now(),
        phase: ContainerPhase::Creating,
        config: config.clone(),
    })
}

fn is_privileged(config: &ContainerConfig) -> bool {
    let linux = config.linux.as_ref();
    let security = linux.and_then(|linux| linux.security_context.as_ref());
    security.is_some_and(|security| security.privileged)
}

/// Returns whether creation failed because the process cannot run as specified.
fn is_of_process(error: &SandboxError) -> bool {
    matches!(
        error.kind(),
        Some(
            RefusalKind::CommandNotFound
                | RefusalKind::CommandNotExecutable
                | RefusalKind::LaunchFailed
        )
    )
}

/// Returns the name that is reported for a container's image: the tag that the user wrote, if the
/// image has it, else its first one. The kubelet requests images by id.
fn image_tag(image: &Image, config: &ContainerConfig) -> String {
    let named = config.image.as_ref();
    let named = named.and_then(|image| parse_reference(&image.user_specified_image).ok());
    let named = named.map(|reference| reference.to_string());
    let tags = image.tags();
    let tag = tags.iter().find(|tag| Some(*tag) == named.as_ref());
    tag.or_else(|| tags.first()).cloned().unwrap_or_default()
}

/// Returns the reference that the kubelet reports as the container's image.
fn image_ref(image: &Image) -> String {
    let digest = image.digests().first();
    digest.cloned().unwrap_or_else(|| image.id().to_string())
}
