//! The machine that a template is a snapshot of, and where its template is.

use std::ffi::OsString;
use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::SystemTime;

use rustix::fs::{Mode, OFlags};
use serde::{Deserialize, Serialize};
use tokio::process::Command;
use tracing::{debug, warn};

use super::clean::{has_room, remove};
use super::{MEMORY, STATE, Template, TemplateError, create, file, has_just_failed};
use crate::log_tail::last_line;
use crate::machine::{NicKind, Transport, causes};
use crate::oom;
use crate::provisional_nics::{MAX_NICS, mtu};
use crate::types::LaunchConfig;

/// The log of a process that creates a template.
const LOG: &str = "template.log";

/// The machine that a template is a snapshot of. `podvisor template` is told it in JSON.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Shape {
    /// Kernel, an ELF vmlinux or a bzImage.
    pub kernel: PathBuf,
    /// Initramfs that holds the agent.
    pub initramfs: PathBuf,
    /// Virtual CPUs.
    pub vcpus: u8,
    /// The maximum of vCPUs at run time.
    pub max_vcpus: u8,
    /// Memory in bytes.
    pub memory: u64,
    /// Bytes that may be added at run time.
    pub growth: u64,
    /// Disks without a medium.
    pub image_slots: u8,
    /// Network cards.
    pub nics: u8,
    /// The kind of all cards on the host.
    pub nic_kind: NicKind,
    /// Whether there is a shared directory.
    pub shares: bool,
    /// The bus of the devices.
    #[serde(with = "TransportForm")]
    pub transport: Transport,
    /// Whether the guest's kernel counts pressure.
    pub psi: bool,
}

/// The form of a [`Transport`] in a [`Shape`].
#[derive(Serialize, Deserialize)]
#[serde(remote = "Transport", rename_all = "lowercase")]
enum TransportForm {
    Mmio,
    Pci,
}

impl Shape {
    /// Returns the shape of a launch's machine; `None` if it cannot be a clone.
    pub(crate) fn of(config: &LaunchConfig) -> Option<Self> {
        let nic_kind = config
            .nics
            .first()
            .map_or_else(NicKind::default, |nic| nic.kind);
        let fits = config.console.is_none()
            && config.nics.len() <= usize::from(MAX_NICS)
            && config.nics.iter().all(|nic| nic.kind == nic_kind)
            && config.nics.iter().all(|nic| nic.mtu <= mtu(nic_kind));
        fits.then(|| Self {
            kernel: config.kernel.clone(),
            initramfs: config.initramfs.clone(),
            vcpus: config.vcpus,
            max_vcpus: config.max_vcpus,
            memory: config.memory,
            growth: config.growth,
            image_slots: config.image_slots,
            nics: u8::try_from(config.nics.len()).unwrap_or(MAX_NICS),
            nic_kind,
            shares: config.shared_dir.is_some(),
            transport: config.transport,
            psi: config.psi,
        })
    }

    /// Returns the path of its template for sandboxes of `program`.
    pub(super) fn place(&self, program: &Path, templates: &Path) -> io::Result<PathBuf> {
        let mut name = DefaultHasher::new();
        self.hash(&mut name);
        for path in [program, &self.kernel, &self.initramfs] {
            // Not its inode: one file has several, seen through an overlay. Packages and images of
            // systems give all files one time of modification, and two kernels may be equally long;
            // the time of change is that of the installation.
            let meta = fs::metadata(path)?;
            (meta.len(), meta.mtime(), meta.mtime_nsec()).hash(&mut name);
            (meta.ctime(), meta.ctime_nsec()).hash(&mut name);
        }
        Ok(templates.join(format!("{:016x}", name.finish())))
    }

    /// Opens the template of this shape, if there is one.
    pub(crate) fn find(&self, program: &Path, templates: &Path) -> Option<Template> {
        let place = self.place(program, templates).ok()?;
        // Both are opened in one directory, as another one may replace it meanwhile.
        let dir = File::open(&place).ok()?;
        let open = |name| {
            let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
            rustix::fs::openat(&dir, name, flags, Mode::empty())
        };
        let found = Template {
            state: open(STATE).ok()?,
            memory: open(MEMORY).ok()?,
        };
        debug!(template = %place.display(), "there is a template");
        // The most recently used one is the last to be removed.
        let now = SystemTime::now();
        if let Err(error) = dir.set_modified(now) {
            debug!(%error, "the template stays as old as it was");
        }
        Some(found)
    }

    /// Removes an unusable template. Running clones keep their files.
    pub(crate) fn discard(&self, program: &Path, templates: &Path) {
        let place = self.place(program, templates);
        if let Err(error) = place.and_then(|place| remove(&place)) {
            debug!(%error, "a template of no use stays");
        }
    }

    /// Starts a process of `program` that creates the template, unless another process does or it
    /// has just failed. Does not wait for it.
    pub(crate) fn make_later(&self, program: &Path, templates: &Path) {
        let place = self.place(program, templates);
        if place.is_ok_and(|place| has_just_failed(&place)) {
            debug!("a template could not be made and is not tried again yet");
            return;
        }
        if !has_room(templates) {
            debug!("as many other templates as are kept are in use");
            return;
        }
        if let Err(error) = self.start_making(program, templates) {
            warn!(error = causes(&error), "failed to create a template");
        }
    }

    /// Returns the arguments of podvisor's process that creates the template in `templates`.
    ///
    /// # Errors
    /// [`TemplateError::Argument`].
    pub fn arguments(&self, templates: &Path) -> Result<[OsString; 3], TemplateError> {
        let shape = serde_json::to_string(self).map_err(TemplateError::Argument)?;
        Ok(["template".into(), shape.into(), templates.into()])
    }

    fn start_making(&self, program: &Path, templates: &Path) -> Result<(), TemplateError> {
        create(templates)?;
        let log = templates.join(LOG);
        let stderr = File::create(&log).map_err(file("create", &log))?;
        let mut command = Command::new(program);
        command
            .arg0("podvisor")
            .args(self.arguments(templates)?)
            .current_dir("/")
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(stderr);
        let mut child = command.spawn().map_err(file("run", program))?;
        if let Some(Err(error)) = child.id().map(oom::expose) {
            debug!(%error, "failed to reset the inherited oom_score_adj");
        }
        // Reaped when it ends, if this process still lives.
        tokio::spawn(async move {
            match child.wait().await {
                Ok(status) if status.success() => {}
                Ok(status) => warn!(
                    why = last_line(&log),
                    %status,
                    "failed to create a template: for some minutes, guests like this one boot"
                ),
                Err(error) => debug!(%error, "the process that makes a template was lost"),
            }
        });
        Ok(())
    }
}

#[cfg(test)]
impl Shape {
    /// Creates empty files in place of a template's.
    pub(crate) fn pretend(&self, program: &Path, templates: &Path) {
        let place = self.place(program, templates).unwrap();
        fs::create_dir_all(&place).unwrap();
        for name in [STATE, MEMORY] {
            fs::write(place.join(name), "").unwrap();
        }
    }
}

/// A shape whose files are in `dir`.
#[cfg(test)]
pub(super) fn sample(dir: &Path) -> Shape {
    let [kernel, initramfs] = ["kernel", "initramfs"].map(|name| {
        let path = dir.join(name);
        fs::write(&path, name).unwrap();
        path
    });
    Shape {
        kernel,
        initramfs,
        vcpus: 1,
        max_vcpus: 1,
        memory: 64 << 20,
        growth: 0,
        image_slots: 2,
        nics: 1,
        nic_kind: NicKind::Tap,
        shares: true,
        transport: Transport::Pci,
        psi: true,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::THIS_PROGRAM;
    use super::sample as shape;
    use super::*;

    #[test]
    fn another_kernel_or_machine_has_another_template() {
        let dir = tempfile::tempdir().unwrap();
        let shape = shape(dir.path());
        let program = Path::new(THIS_PROGRAM);
        let place = |shape: &Shape| shape.place(program, dir.path()).unwrap();
        let first = place(&shape);
        assert_eq!(place(&shape.clone()), first);
        let larger = Shape {
            memory: 65 << 20,
            ..shape.clone()
        };
        assert_ne!(place(&larger), first);
        let other_card = Shape {
            nic_kind: NicKind::Stream,
            ..shape.clone()
        };
        assert_ne!(place(&other_card), first);
        let other_kernel_parameters = Shape {
            psi: false,
            ..shape.clone()
        };
        assert_ne!(place(&other_kernel_parameters), first);
        fs::write(&shape.kernel, "another one").unwrap();
        assert_ne!(place(&shape), first);
    }

    #[test]
    fn a_kernel_of_the_same_length_and_time_has_another_template() {
        let dir = tempfile::tempdir().unwrap();
        let shape = shape(dir.path());
        let time = SystemTime::UNIX_EPOCH + Duration::from_secs(1);
        let install = |text: &str| {
            let unpacked = dir.path().join("unpacked");
            fs::write(&unpacked, text).unwrap();
            File::options()
                .write(true)
                .open(&unpacked)
                .and_then(|file| file.set_modified(time))
                .unwrap();
            fs::rename(unpacked, &shape.kernel).unwrap();
            let metadata = fs::metadata(&shape.kernel).unwrap();
            (metadata.ctime(), metadata.ctime_nsec())
        };
        let place = || shape.place(Path::new(THIS_PROGRAM), dir.path()).unwrap();
        let first_at = install("kernel 1");
        let first = place();
        // The file system's clock has steps.
        while install("kernel 2") == first_at {}
        assert_ne!(place(), first);
    }

    #[test]
    fn a_template_is_found_when_both_files_are_there_and_not_once_it_is_discarded() {
        let dir = tempfile::tempdir().unwrap();
        let shape = shape(dir.path());
        let program = Path::new(THIS_PROGRAM);
        let is_found = || shape.find(program, dir.path()).is_some();
        assert!(!is_found());
        let place = shape.place(program, dir.path()).unwrap();
        fs::create_dir(&place).unwrap();
        fs::write(place.join(STATE), "").unwrap();
        assert!(!is_found());
        fs::write(place.join(MEMORY), "").unwrap();
        assert!(is_found());
        shape.discard(program, dir.path());
        assert!(!is_found());
    }
}
