//! Import of a root file system as an image.

use std::fs::File;
use std::io::{self, BufWriter, Read, Write};
use std::path::Path;
use std::time::{Duration, UNIX_EPOCH};

use sha2::{Digest as _, Sha256};

use super::database::Record;
use super::load::synthesise;
use super::lookup::names_of;
use super::rootfs::Wanted;
use super::{Inner, PullOptions, Store};
use crate::error::parse_reference;
use crate::import::{self, ImportError, ImportSource, TarSummary};
use crate::{Cancel, Digest, Error, Image, PullEvent, Reference, Result, TarError};

const CHUNK: usize = 256 << 10;
/// The last second that RFC 3339 can express, at the end of the year 9999.
const LAST: i64 = 253_402_300_799;

impl Store {
    /// Creates an image of one layer from a root file system, with a configuration that names no
    /// command. The same files give the same image. Without a name, the image is found by its id.
    /// Blocks until done; of `options`, the events and the cancellation are used.
    ///
    /// # Errors
    /// [`Error::Import`] and [`Error::Layer`] say what in the root file system cannot be in an
    /// image; a directory that changes while it is read is refused. The store is then as it was.
    pub fn import(
        &self,
        source: ImportSource,
        name: Option<&str>,
        options: &PullOptions,
    ) -> Result<Image> {
        let reference = name.map(parse_reference).transpose()?;
        let inner = &self.inner;
        let outcome = inner
            .hold_files()
            .and_then(|_stay| inner.import(source, reference.as_ref(), options));
        inner.clear_after(outcome)
    }
}

impl Inner {
    fn import(
        &self,
        source: ImportSource,
        reference: Option<&Reference>,
        options: &PullOptions,
    ) -> Result<Image> {
        let (layer, size, survey) = match source {
            ImportSource::Directory(path) => self.import_directory(&path, &options.cancel)?,
            ImportSource::Tar(file) => self.import_tar(file, &options.cancel)?,
        };
        let config = config(&survey);
        let id = Digest::of(&config);
        let descriptor = self.layer_descriptor(&layer, size);
        let manifest = synthesise(id, config.len(), vec![descriptor]);
        let digest = Digest::of(&manifest);
        let _claim = self.claim_image(&id, options)?;
        let wanted = Wanted {
            id,
            target: digest,
            layers: vec![(layer, size)],
        };
        let rootfs = self.load_rootfs(&wanted, &[survey.diff_id], options)?;
        let new = rootfs.is_new();
        let names = reference.map_or_else(Vec::new, |reference| {
            names_of(reference, &digest, id).into()
        });
        let record = rootfs.record(Record::new(digest));
        let documents = [(digest, manifest), (id, config)];
        let cancelled = options.cancel.flag();
        let image = self.commit(id, record, names, &documents, &cancelled)?;
        options.emit(PullEvent::Done { id, new });
        Ok(image)
    }

    /// Stores a directory as a layer; returns its digest, size and survey.
    fn import_directory(&self, path: &Path, cancel: &Cancel) -> Result<(Digest, u64, TarSummary)> {
        let work = self.unnamed_work()?;
        let fault = |source| Error::io("write", work.path(), source);
        let limits = &self.options.limits;
        let hashing = Hashing::new(work.handle().map_err(fault)?);
        let mut out = BufWriter::with_capacity(CHUNK, hashing);
        let newest =
            import::directory::write(path, &mut out, limits, cancel).map_err(
                |error| match error {
                    Error::Import(ImportError::Write(source)) => fault(source),
                    error => error,
                },
            )?;
        let hashing = out
            .into_inner()
            .map_err(|error| fault(error.into_error()))?;
        let (digest, size) = hashing.finish();
        self.publish_blob(work, &digest)?;
        let diff_id = digest;
        Ok((digest, size, TarSummary { diff_id, newest }))
    }

    /// Stores a tar as a layer, unchanged.
    fn import_tar(&self, mut file: File, cancel: &Cancel) -> Result<(Digest, u64, TarSummary)> {
        let work = self.unnamed_work()?;
        let fault = |source| Error::io("write", work.path(), source);
        let limits = &self.options.limits;
        let mut out = Hashing::new(work.handle().map_err(fault)?);
        let mut buffer = vec![0; CHUNK];
        loop {
            cancel.check()?;
            let got = match file.read(&mut buffer) {
                Ok(0) => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => {
                    return Err(Error::Archive(TarError::Read(error).into()));
                }
                Ok(got) => got,
            };
            out.write_all(&buffer[..got]).map_err(fault)?;
            if out.size > limits.layer_bytes {
                let (what, limit) = ("bytes", limits.layer_bytes);
                return Err(ImportError::Limit { what, limit }.into());
            }
        }
        let (digest, size) = out.finish();
        let mut written = work.handle().map_err(fault)?;
        io::Seek::rewind(&mut written).map_err(fault)?;
        let survey = import::survey(written, limits, cancel)?;
        self.publish_blob(work, &digest)?;
        Ok((digest, size, survey))
    }
}

/// Creates a minimal configuration for the layer.
fn config(survey: &TarSummary) -> Vec<u8> {
    let seconds = survey.newest.clamp(0, LAST).unsigned_abs();
    let created = humantime::format_rfc3339_seconds(UNIX_EPOCH + Duration::from_secs(seconds));
    let created = created.to_string();
    let config = serde_json::json!({
        "created": created,
        "architecture": "amd64",
        "os": "linux",
        "config": {},
        "rootfs": {"type": "layers", "diff_ids": [survey.diff_id]},
        "history": [{"created": created, "comment": "imported by podvisor"}],
    });
    config.to_string().into_bytes()
}

/// Computes the digest of the data that is written.
struct Hashing {
    file: File,
    hasher: Sha256,
    size: u64,
}

impl Hashing {
    fn new(file: File) -> Self {
        Self {
            file,
            hasher: Sha256::new(),
            size: 0,
        }
    }

    fn finish(self) -> (Digest, u64) {
        (Digest::finish(self.hasher), self.size)
    }
}

impl Write for Hashing {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.file.write(bytes)?;
        self.hasher.update(&bytes[..written]);
        self.size += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}
