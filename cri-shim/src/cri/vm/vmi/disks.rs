//! The files of a machine's disks. It blocks.

use podvisor_cloud_init::fat::Volume;
use podvisor_images::{Disk, Store};

use super::super::disks::DiskFiles;
use super::super::honour::FileMount;
use super::super::seed::read_files;
use super::seed::SeedMaker;
use super::sources::{Sources, make_empty};
use crate::cri::error::{CriError, Result};
use crate::cri::state::{DiskContent, DiskRecord, KernelRecord};
use crate::cri::vm_spec::{DiskSource, GUEST_AGENT, VmiBoot, VmiDisk, VmiError, VmiMachine};

/// Most bytes of a kernel, and of its initramfs.
const MAX_KERNEL: u64 = 1 << 30;

/// What a machine's disks are made of.
#[derive(Debug)]
pub(in crate::cri::vm) struct VmiDisks<'a> {
    pub(in crate::cri::vm) machine: &'a VmiMachine,
    pub(in crate::cri::vm) container: &'a podvisor_cri_messages::ContainerConfig,
    /// The disk in the container's image, if it has one.
    pub(in crate::cri::vm) image: Option<&'a Disk>,
    pub(in crate::cri::vm) store: &'a Store,
    pub(in crate::cri::vm) files: &'a DiskFiles,
    /// The guest's name.
    pub(in crate::cri::vm) host_name: String,
    /// The guest agent's program, if it is to be installed.
    pub(in crate::cri::vm) agent: Option<Vec<u8>>,
}

impl VmiDisks<'_> {
    /// Makes the disks, in the guest's order.
    pub(in crate::cri::vm) fn make(&self) -> Result<Vec<DiskRecord>> {
        let is_seed = |disk: &VmiDisk| matches!(disk.source, DiskSource::Seed(_));
        if self.agent.is_some() && !self.machine.disks.iter().any(is_seed) {
            return Err(CriError::invalid(
                GUEST_AGENT,
                "the agent is installed by cloud-init: give the instance a volume \
                 cloudInitNoCloud or cloudInitConfigDrive",
            ));
        }
        let sources = Sources(self.container);
        let disks = self.machine.disks.iter().enumerate();
        disks
            .map(|(index, disk)| {
                let (content, is_read_only) = self.content(sources, index, disk)?;
                Ok(DiskRecord {
                    serial: disk.serial.clone(),
                    is_read_only,
                    is_local: matches!(disk.source, DiskSource::Empty(_)),
                    content,
                })
            })
            .collect()
    }

    fn content(
        &self,
        sources: Sources<'_>,
        index: usize,
        disk: &VmiDisk,
    ) -> Result<(DiskContent, bool)> {
        let field = |problem: String| CriError::Vmi(VmiError::field(&disk.path, problem));
        let (path, name) = (disk.path.as_str(), disk.name.as_str());
        let is_read_only = disk.is_read_only;
        let content = match &disk.source {
            DiskSource::Image => {
                let image = self.image.ok_or_else(|| {
                    field("shows the container's image, which has no disk".to_owned())
                })?;
                self.of_image(index, image, is_read_only)?
            }
            DiskSource::ImageVolume => {
                let image = sources.image(path, name).map_err(CriError::Vmi)?;
                let image = self.store.container_disk(image)?;
                self.of_image(index, &image, is_read_only)?
            }
            DiskSource::Claim => {
                let place = sources.claim(path, name).map_err(CriError::Vmi)?;
                let is_read_only = is_read_only || place.is_read_only;
                let opened = place.file.open(is_read_only);
                opened.map_err(|error| field(unusable(&error)))?;
                return Ok((DiskContent::Node(place.file), is_read_only));
            }
            DiskSource::Ephemeral => {
                let place = sources.claim(path, name).map_err(CriError::Vmi)?;
                let base = place.file.open(true);
                let base = base.map_err(|error| field(unusable(&error)))?;
                let overlay =
                    self.files
                        .overlay(&format!("{index}.disk"), &base, place.file.path(), None)?;
                DiskContent::Ephemeral {
                    base: place.file,
                    overlay,
                }
            }
            DiskSource::Empty(bytes) => {
                let directory = sources.directory(path, name).map_err(CriError::Vmi)?;
                let made = make_empty(directory, *bytes);
                let made = made.map_err(CriError::io("make the empty disk in", directory))?;
                DiskContent::Node(made)
            }
            DiskSource::Files(label) => {
                let directory = sources.files(path, name).map_err(CriError::Vmi)?;
                let mount = FileMount {
                    from: directory.display().to_string(),
                    to: String::new(),
                };
                let mut volume = Volume::new(label).map_err(|error| field(error.to_string()))?;
                for file in read_files(&[mount])? {
                    let name = file.path.trim_start_matches('/');
                    let added = volume.add(name, file.content);
                    added.map_err(|error| field(error.to_string()))?;
                }
                self.volume(index, &volume)?
            }
            DiskSource::Seed(seed) => {
                let maker = SeedMaker {
                    machine: self.machine,
                    sources,
                    host_name: &self.host_name,
                    agent: self.agent.as_deref(),
                };
                let seed = maker.seed(disk, seed)?;
                let volume = seed.volume().map_err(|error| field(error.to_string()))?;
                self.volume(index, &volume)?
            }
        };
        Ok((content, is_read_only))
    }

    /// A disk that is never written needs no overlay.
    fn of_image(&self, index: usize, image: &Disk, is_read_only: bool) -> Result<DiskContent> {
        let id = image.id().to_string();
        if is_read_only {
            return Ok(DiskContent::Image { id, overlay: None });
        }
        let name = format!("{index}.disk");
        let overlay = self
            .files
            .overlay(&name, &image.open()?, image.path(), None)?;
        Ok(DiskContent::Image {
            id,
            overlay: Some(overlay),
        })
    }

    fn volume(&self, index: usize, volume: &Volume) -> Result<DiskContent> {
        let name = format!("{index}.img");
        self.files.volume(&name, volume)?;
        Ok(DiskContent::Made(name))
    }

    /// Copies the kernel to boot, if the machine has one of its own.
    pub(in crate::cri::vm) fn kernel(&self) -> Result<Option<KernelRecord>> {
        let VmiBoot::Kernel {
            kernel,
            initrd,
            cmdline,
        } = &self.machine.boot
        else {
            return Ok(None);
        };
        let image = Sources(self.container)
            .kernel_image()
            .map_err(CriError::Vmi)?;
        let image = self.store.resolve(image)?;
        let copy = |name: &str, path: &str| -> Result<()> {
            let mut to = self.files.create(name)?;
            image.copy_file(path, &mut to, MAX_KERNEL)?;
            Ok(())
        };
        copy(KernelRecord::KERNEL, kernel)?;
        if let Some(initrd) = initrd {
            copy(KernelRecord::INITRAMFS, initrd)?;
        }
        Ok(Some(KernelRecord {
            has_initramfs: initrd.is_some(),
            cmdline: cmdline.clone(),
        }))
    }
}

/// Why a claim is not a disk.
fn unusable(error: &std::io::Error) -> String {
    match error.kind() {
        std::io::ErrorKind::NotFound => {
            "has no disk.img: put the disk's raw image there, by a DataVolume for example"
                .to_owned()
        }
        _ => format!("cannot be opened as a disk: {error}"),
    }
}
