//! What `vm migrate` and `vm receive` say to each other before the machine's own migration: who
//! comes, and the files of its directory that do not change while it runs.
//!
//! | from | what |
//! | --- | --- |
//! | here | [`MAGIC`], then the [`Offer`] as JSON |
//! | there | an [`Answer`] as JSON |
//! | here | the small files of the offer, then the image if the answer wants it |
//! | there | an [`Answer`]: the machine's process waits |
//! | both | the stream of the migration (docs/migration.md) |
//!
//! JSON has its length before it (4 bytes, little-endian). The image comes as pieces: offset (8),
//! length (4), bytes; one without bytes at the image's end is the last.
//!
//! All of it is untrusted input on both sides: lengths are compared with limits before anything is
//! read, and names with those that a VM's directory has.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::Path;

use anyhow::{Context as _, bail, ensure};
use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::disk::DiskShape;
use super::seed;
use crate::cli::container::Record;

/// What comes first. It differs in each version of what follows.
const MAGIC: &[u8; 16] = b"podvisor vm  v1\n";

/// Most bytes of an offer or an answer.
const MAX_JSON: u32 = 1 << 20;

/// Most bytes of a small file.
const MAX_FILE: u64 = 64 << 20;

/// Most bytes of a piece of an image.
const MAX_PIECE: usize = 1 << 20;

/// Most bytes of an image.
const MAX_IMAGE: u64 = 64 << 40;

/// The files that may come besides the disk.
const FILES: [&str; 3] = [seed::FILE, seed::USER_DATA, seed::IGNITION];

/// The VM that comes.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Offer {
    /// Names the migration.
    pub(super) migration: String,
    pub(super) record: Record,
    pub(super) disk: DiskShape,
    /// Small files: name and length.
    pub(super) files: Vec<(String, u64)>,
    /// How long the other side may be silent before the machine comes, in seconds.
    pub(super) patience: u64,
}

/// What the other side says.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Answer {
    /// Why it does not take the VM.
    pub(super) refusal: Option<String>,
    /// It does not have the image that the VM's disk began with.
    pub(super) wants_image: bool,
}

impl Answer {
    /// Returns an error if the VM is refused.
    fn accepted(self) -> anyhow::Result<Self> {
        match self.refusal {
            None => Ok(self),
            // It may have been written for a terminal to obey.
            Some(why) => bail!("the other side refuses it: {}", why.escape_debug()),
        }
    }
}

/// Sends an offer; returns the answer.
pub(super) fn offer(mut io: impl Read + Write, offer: &Offer) -> anyhow::Result<Answer> {
    let sent = io.write_all(MAGIC).context(LOST);
    let sent = sent.and_then(|()| write_json(&mut io, offer));
    // Whoever does not listen may have said why.
    let answer = answer(io)?;
    sent.map(|()| answer)
}

/// What is said of a connection that ended.
const LOST: &str = "the connection to the other side ended";

/// Receives an answer.
pub(super) fn answer(mut io: impl Read) -> anyhow::Result<Answer> {
    let answer: Answer = read_json(&mut io).context(
        "the other side is no `podvisor vm receive`: run the command there by hand to see what it \
         prints",
    )?;
    answer.accepted()
}

/// Sends an answer.
pub(super) fn reply(mut io: impl Write, answer: &Answer) -> anyhow::Result<()> {
    write_json(&mut io, answer)
}

/// Receives an offer, which is checked as far as it can be without this host.
pub(super) fn receive_offer(mut io: impl Read) -> anyhow::Result<Offer> {
    let mut magic = [0; MAGIC.len()];
    io.read_exact(&mut magic).context(LOST)?;
    ensure!(
        &magic == MAGIC,
        "what comes is no virtual machine of this version of podvisor"
    );
    let offer: Offer = read_json(&mut io)?;
    offer.check()?;
    Ok(offer)
}

impl Offer {
    fn check(&self) -> anyhow::Result<()> {
        let record = &self.record;
        ensure!(
            record.vm.is_some() && !record.is_pod && record.pod.is_none(),
            "what comes is no virtual machine"
        );
        ensure!(
            record.volumes.is_empty(),
            "the virtual machine shares directories with its host"
        );
        for (name, len) in &self.files {
            let is_known = FILES.contains(&name.as_str());
            let is_once = self.files.iter().filter(|(other, _)| other == name).count() == 1;
            ensure!(
                is_known && is_once && *len <= MAX_FILE,
                "a virtual machine has no file {name:?} of {len} bytes"
            );
        }
        let DiskShape { size, image, .. } = self.disk;
        ensure!(
            size <= MAX_IMAGE && image <= MAX_IMAGE,
            "the disk of the virtual machine is too large"
        );
        Ok(())
    }
}

/// Returns the small files of a VM's directory.
pub(super) fn small_files(dir: &Path) -> anyhow::Result<Vec<(String, u64)>> {
    let mut files = Vec::new();
    for name in FILES {
        match std::fs::metadata(dir.join(name)) {
            Ok(meta) => files.push((name.to_owned(), meta.len())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => {
                return Err(error).with_context(|| format!("cannot read the VM's {name}"));
            }
        }
    }
    Ok(files)
}

/// Sends the small files.
pub(super) fn send_files(
    mut to: impl Write,
    dir: &Path,
    files: &[(String, u64)],
) -> anyhow::Result<()> {
    for (name, len) in files {
        let file = File::open(dir.join(name));
        let file = file.with_context(|| format!("cannot open the VM's {name}"))?;
        let sent = io::copy(&mut file.take(*len), &mut to).context(LOST)?;
        ensure!(sent == *len, "the VM's {name} became shorter meanwhile");
    }
    to.flush().context(LOST)
}

/// Stores the small files in a VM's directory.
pub(super) fn receive_files(
    mut from: impl Read,
    dir: &Path,
    files: &[(String, u64)],
) -> anyhow::Result<()> {
    for (name, len) in files {
        let mut options = File::options();
        let options = options.write(true).create_new(true).mode(0o600);
        let file = options.open(dir.join(name));
        let mut file = file.with_context(|| format!("cannot create the VM's {name}"))?;
        let mut part = (&mut from).take(*len);
        let stored = io::copy(&mut part, &mut file);
        let stored = stored.with_context(|| format!("cannot store the VM's {name}"))?;
        ensure!(stored == *len, LOST);
    }
    Ok(())
}

/// Sends an image without its holes; `tell` hears how far it is, and may end it.
pub(super) fn send_image(
    mut to: impl Write,
    image: &File,
    len: u64,
    mut tell: impl FnMut(u64),
) -> anyhow::Result<()> {
    let mut buffer = vec![0; MAX_PIECE];
    let mut at = 0;
    while at < len {
        let start = match seek(image, SeekFrom::Data(at)) {
            Ok(start) => start.min(len),
            Err(Errno::NXIO) => len,
            // Not every file system tells its holes.
            Err(Errno::INVAL) => at,
            Err(error) => return Err(error).context("cannot read the VM's image"),
        };
        let end = match seek(image, SeekFrom::Hole(start)) {
            Ok(end) => end.min(len),
            Err(_) => len,
        };
        at = start;
        while at < end {
            let count = usize::try_from(end - at).unwrap_or(MAX_PIECE);
            let piece = &mut buffer[..count.min(MAX_PIECE)];
            image
                .read_exact_at(piece, at)
                .context("cannot read the VM's image")?;
            write_piece(&mut to, at, piece)?;
            at += piece.len() as u64;
            tell(at);
        }
    }
    write_piece(&mut to, len, &[])?;
    to.flush().context(LOST)
}

fn write_piece(mut to: impl Write, at: u64, piece: &[u8]) -> anyhow::Result<()> {
    let len = u32::try_from(piece.len()).unwrap_or(u32::MAX);
    let header = [&at.to_le_bytes()[..], &len.to_le_bytes()].concat();
    to.write_all(&header).context(LOST)?;
    to.write_all(piece).context(LOST)
}

/// Stores an image of `len` bytes in an empty file.
pub(super) fn receive_image(mut from: impl Read, image: &File, len: u64) -> anyhow::Result<()> {
    let store = "cannot store the VM's image";
    image.set_len(len).context(store)?;
    let mut buffer = vec![0; MAX_PIECE];
    loop {
        let (mut at, mut count) = ([0; 8], [0; 4]);
        from.read_exact(&mut at).context(LOST)?;
        from.read_exact(&mut count).context(LOST)?;
        let (at, count) = (u64::from_le_bytes(at), u32::from_le_bytes(count) as usize);
        let end = at.checked_add(count as u64);
        ensure!(
            count <= MAX_PIECE && end.is_some_and(|end| end <= len),
            "the virtual machine's image has {count} bytes at {at}, and ends at {len}"
        );
        if count == 0 {
            ensure!(at == len, LOST);
            return Ok(());
        }
        let piece = &mut buffer[..count];
        from.read_exact(piece).context(LOST)?;
        image.write_all_at(piece, at).context(store)?;
    }
}

/// Copies bytes from one end to the other as they come, until one of both has ended. It does not
/// splice as [`io::copy`] does: a call that waits for more of a socket keeps the reader of a pipe
/// from what is in it already.
pub(super) fn carry(mut from: impl Read, mut to: impl Write) -> io::Result<()> {
    let mut buffer = vec![0; MAX_PIECE];
    loop {
        match from.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(count) => to.write_all(&buffer[..count])?,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

fn write_json(mut to: impl Write, value: &impl Serialize) -> anyhow::Result<()> {
    let text = serde_json::to_vec(value).context("cannot write JSON")?;
    let len = u32::try_from(text.len())
        .ok()
        .filter(|len| *len <= MAX_JSON);
    let len = len.context("the description of the virtual machine is too long")?;
    to.write_all(&len.to_le_bytes()).context(LOST)?;
    to.write_all(&text).context(LOST)?;
    to.flush().context(LOST)
}

fn read_json<T: DeserializeOwned>(mut from: impl Read) -> anyhow::Result<T> {
    let mut len = [0; 4];
    from.read_exact(&mut len).context(LOST)?;
    let len = u32::from_le_bytes(len);
    ensure!(
        len <= MAX_JSON,
        "{len} bytes where a short text was expected"
    );
    let mut text = Vec::new();
    let read = from.take(len.into()).read_to_end(&mut text).context(LOST)?;
    ensure!(read == len as usize, LOST);
    serde_json::from_slice(&text).context("what came is not what was expected")
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use crate::cli::container::{VmRecord, sample_record};

    use super::*;

    fn sample() -> Offer {
        Offer {
            migration: "m".to_owned(),
            record: Record {
                vm: Some(VmRecord::default()),
                ..sample_record("a", "web")
            },
            disk: DiskShape {
                is_qcow2: true,
                size: 8 << 20,
                image: 4 << 20,
            },
            files: vec![(seed::FILE.to_owned(), 5)],
            patience: 60,
        }
    }

    #[test]
    fn an_offer_is_answered_and_its_files_and_image_come() {
        let (here, there) = UnixStream::pair().unwrap();
        let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        std::fs::write(from.path().join(seed::FILE), "seed!").unwrap();
        assert_eq!(small_files(from.path()).unwrap(), sample().files);
        let image = tempfile::tempfile().unwrap();
        image.set_len(4 << 20).unwrap();
        for at in [0, (2 << 20) - 100] {
            image.write_all_at(&[7; 5000], at).unwrap();
        }
        let dir = to.path().to_owned();
        let receiver = std::thread::spawn(move || {
            let offer = receive_offer(&there).unwrap();
            assert_eq!(offer.record.name, "web");
            let wants = Answer {
                wants_image: true,
                ..Answer::default()
            };
            reply(&there, &wants).unwrap();
            receive_files(&there, &dir, &offer.files).unwrap();
            let stored = tempfile::tempfile().unwrap();
            receive_image(&there, &stored, offer.disk.image).unwrap();
            let no = Answer {
                refusal: Some("no\x1b room".to_owned()),
                ..Answer::default()
            };
            reply(&there, &no).unwrap();
            stored
        });
        assert!(offer(&here, &sample()).unwrap().wants_image);
        send_files(&here, from.path(), &sample().files).unwrap();
        send_image(&here, &image, 4 << 20, |_| ()).unwrap();
        let said = answer(&here).unwrap_err().to_string();
        assert!(said.contains("no\\u{1b} room"), "{said}");
        let stored = receiver.join().unwrap();
        let bytes = |file: &File| {
            let mut bytes = vec![0; 4 << 20];
            file.read_exact_at(&mut bytes, 0).unwrap();
            bytes
        };
        assert!(bytes(&stored) == bytes(&image));
        let seed = std::fs::read_to_string(to.path().join(seed::FILE));
        assert_eq!(seed.unwrap(), "seed!");
    }

    #[test]
    fn what_comes_cannot_name_other_files_or_be_longer_than_it_says() {
        type Change = fn(&mut Offer);
        let changes: [Change; 7] = [
            |offer| offer.files[0].0 = "../seed.img".to_owned(),
            |offer| offer.files[0].0 = "disk.qcow2".to_owned(),
            |offer| offer.files[0].1 = MAX_FILE + 1,
            |offer| offer.files.push(offer.files[0].clone()),
            |offer| offer.disk.image = u64::MAX,
            |offer| offer.record.vm = None,
            |offer| offer.record.is_pod = true,
        ];
        for change in changes {
            let mut offer = sample();
            change(&mut offer);
            let mut bytes = MAGIC.to_vec();
            write_json(&mut bytes, &offer).unwrap();
            assert!(receive_offer(&bytes[..]).is_err(), "{offer:?}");
        }
        let image = || tempfile::tempfile().unwrap();
        let piece = |at: u64, bytes: &[u8]| {
            let mut piece = Vec::new();
            write_piece(&mut piece, at, bytes).unwrap();
            piece
        };
        for bytes in [
            piece(4090, &[1; 7]),
            piece(u64::MAX, &[1; 7]),
            piece(0, &[]),
            piece(0, &vec![1; MAX_PIECE + 1]),
            piece(0, &[1; 7]),
        ] {
            assert!(receive_image(&bytes[..], &image(), 4096).is_err());
        }
        let mut long = MAGIC.to_vec();
        long.extend((MAX_JSON + 1).to_le_bytes());
        assert!(receive_offer(&long[..]).is_err());
        assert!(receive_offer(&b"Welcome to this host!\n"[..]).is_err());
    }
}
