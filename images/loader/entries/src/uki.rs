//! Unified kernel images (UAPI.5): kernel, initial file system and command line as sections of one
//! PE file.

use thiserror::Error;

use crate::files::Files;
use crate::volumes::{FileError, VolumeId};
use crate::{BootEntry, FilePart, FileRef, Format, limits, version};

/// Where they are, from the root of a file system.
pub const DIRECTORY: &str = "EFI/Linux";

/// Bytes at the start of the file within which its headers end.
const HEADER_BYTES: usize = 64 << 10;
/// Sections of a file.
const SECTIONS: u16 = 96;

/// A unified kernel image that cannot be started.
#[derive(Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum UkiError {
    /// The file cannot be read.
    #[error(transparent)]
    File(#[from] FileError),
    /// It is no PE file with a section `.linux`.
    #[error("{path} is no unified kernel image: {reason}")]
    NotUnified {
        /// The file.
        path: String,
        /// What is missing.
        reason: &'static str,
    },
    /// It is for another machine.
    #[error("{path} is for another machine than x86-64 (PE machine {machine:#06x})")]
    Machine {
        /// The file.
        path: String,
        /// The number in its header.
        machine: u16,
    },
    /// A section is outside of the file.
    #[error("{path} is cut off: its section {section} ends beyond the file")]
    CutOff {
        /// The file.
        path: String,
        /// The section.
        section: &'static str,
    },
}

/// Returns what an image boots.
///
/// # Errors
///
/// If it cannot be read, is no unified image, is for another machine or cut off.
pub fn load(files: &Files<'_>, volume: VolumeId, path: &str) -> Result<BootEntry, UkiError> {
    let not_unified = |reason| UkiError::NotUnified {
        path: path.to_owned(),
        reason,
    };
    let stat = files.stat(volume, path)?;
    let size = stat
        .ok_or_else(|| not_unified("there is no such file"))?
        .size;
    let header = files.read_part(volume, path, 0, HEADER_BYTES)?;
    let pe = field(&header, 0x3c).map(u32::from_le_bytes);
    let pe = pe.and_then(|at| usize::try_from(at).ok());
    let pe = pe.and_then(|at| header.get(at..));
    let pe = pe.filter(|pe| header.starts_with(b"MZ") && pe.starts_with(b"PE\0\0"));
    let pe = pe.ok_or_else(|| not_unified("it is no PE file"))?;
    let half = |offset| field(pe, offset).map(u16::from_le_bytes);
    let (Some(machine), Some(count), Some(optional)) = (half(4), half(6), half(20)) else {
        return Err(not_unified("its header is cut off"));
    };
    if machine != 0x8664 {
        let path = path.to_owned();
        return Err(UkiError::Machine { path, machine });
    }
    let table = pe.get(24 + usize::from(optional)..).unwrap_or_default();
    let sections: Vec<&[u8]> = table
        .chunks_exact(40)
        .take(usize::from(count.min(SECTIONS)))
        .collect();
    // The first of a name: those of further profiles come later.
    let section = |name: &'static str| -> Result<Option<FilePart>, UkiError> {
        let mut padded = [0; 8];
        for (to, from) in padded.iter_mut().zip(name.bytes()) {
            *to = from;
        }
        let Some(section) = sections.iter().find(|section| section.starts_with(&padded)) else {
            return Ok(None);
        };
        let word = |offset| field(section, offset).map_or(0, u32::from_le_bytes);
        let (in_memory, in_file, offset) = (word(8), word(16), word(20));
        // The file's part is padded; one that says nothing of memory is not.
        let len = match in_memory {
            0 => in_file,
            in_memory => in_memory.min(in_file),
        };
        let part = FilePart {
            offset: u64::from(offset),
            len: u64::from(len),
        };
        if part.offset + part.len > size {
            return Err(UkiError::CutOff {
                path: path.to_owned(),
                section: name,
            });
        }
        Ok(Some(part))
    };
    let text = |name: &'static str| -> Result<Option<String>, UkiError> {
        let Some(part) = section(name)? else {
            return Ok(None);
        };
        let len = usize::try_from(part.len).unwrap_or(usize::MAX);
        let len = len.min(limits::VALUE_BYTES);
        let bytes = files.read_part(volume, path, part.offset, len)?;
        let text = String::from_utf8_lossy(&bytes);
        Ok(Some(text.trim_matches(['\0', '\n', ' ']).to_owned()))
    };
    let part = |part| FileRef {
        volume,
        path: path.to_owned(),
        part: Some(part),
    };
    let linux = section(".linux")?.ok_or_else(|| not_unified("it has no section .linux"))?;
    let release = text(".osrel")?.unwrap_or_default();
    let name = path.rsplit_once('/').map_or(path, |(_, name)| name);
    Ok(BootEntry {
        title: pretty_name(&release).unwrap_or_else(|| name.to_owned()),
        format: Format::Uki,
        config: FileRef::whole(volume, path),
        kernel: part(linux),
        initrds: section(".initrd")?.map(part).into_iter().collect(),
        cmdline: text(".cmdline")?.unwrap_or_default(),
    })
}

/// Returns the newest image by its file's name; `None` if there is none at all.
///
/// # Errors
///
/// That of the newest one, if none can be started.
pub fn newest(files: &Files<'_>, volume: VolumeId) -> Result<Option<BootEntry>, UkiError> {
    let mut names = files.list(volume, DIRECTORY)?;
    names.retain(|name| name.to_ascii_lowercase().ends_with(".efi"));
    names.sort_by(|a, b| version::compare(b, a));
    let mut first = None;
    for name in names {
        match load(files, volume, &format!("{DIRECTORY}/{name}")) {
            Ok(entry) => return Ok(Some(entry)),
            Err(error) => first = first.or(Some(error)),
        }
    }
    first.map_or(Ok(None), Err)
}

fn pretty_name(release: &str) -> Option<String> {
    let value = release
        .lines()
        .find_map(|line| line.strip_prefix("PRETTY_NAME="))?;
    Some(value.trim_matches(['"', '\'']).to_owned())
}

fn field<const N: usize>(bytes: &[u8], offset: usize) -> Option<[u8; N]> {
    bytes.get(offset..)?.get(..N)?.try_into().ok()
}

/// A unified image with these sections, for tests.
#[cfg(any(test, feature = "test-utils"))]
#[must_use]
#[allow(
    clippy::indexing_slicing,
    reason = "offsets within what was made before"
)]
pub fn example(sections: &[(&str, &[u8])]) -> Vec<u8> {
    let mut image = vec![0; 0x400];
    image[..2].copy_from_slice(b"MZ");
    image[0x3c] = 0x80;
    image[0x80..0x84].copy_from_slice(b"PE\0\0");
    image[0x84..0x86].copy_from_slice(&0x8664_u16.to_le_bytes());
    image[0x86] = u8::try_from(sections.len()).unwrap_or(u8::MAX);
    for (number, (name, bytes)) in sections.iter().enumerate() {
        let offset = u32::try_from(image.len()).unwrap_or(0);
        let len = u32::try_from(bytes.len()).unwrap_or(0);
        let header = 0x98 + number * 40;
        image[header..header + name.len()].copy_from_slice(name.as_bytes());
        for (at, word) in [(8, len), (16, len.next_multiple_of(512)), (20, offset)] {
            image[header + at..header + at + 4].copy_from_slice(&word.to_le_bytes());
        }
        image.extend_from_slice(bytes);
        image.resize(image.len().next_multiple_of(512), 0);
    }
    image
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::MemoryVolumes;
    use proptest::prelude::*;

    fn loaded(image: &[u8]) -> Result<BootEntry, UkiError> {
        let volumes = MemoryVolumes::new().ext4("1", &[("x.efi", image)]);
        load(&Files::new(&volumes), VolumeId(0), "x.efi")
    }

    #[test]
    fn the_sections_are_kernel_initrd_and_command_line() {
        let image = example(&[
            (".osrel", b"ID=arch\nPRETTY_NAME=\"Arch Linux\"\n"),
            (".cmdline", b"root=LABEL=x rw\n\0"),
            (".initrd", &[7; 700]),
            (".linux", &[9; 600]),
        ]);
        let entry = loaded(&image).unwrap();
        assert_eq!(entry.title, "Arch Linux");
        assert_eq!(entry.cmdline, "root=LABEL=x rw");
        let bytes = |file: &FileRef| {
            let part = file.part.unwrap();
            let start = usize::try_from(part.offset).unwrap();
            image[start..start + usize::try_from(part.len).unwrap()].to_vec()
        };
        assert_eq!(bytes(&entry.kernel), [9; 600]);
        assert_eq!(bytes(&entry.initrds[0]), [7; 700]);
    }

    #[test]
    fn what_is_no_image_is_refused_by_its_name() {
        let message = |image: &[u8]| loaded(image).unwrap_err().to_string();
        assert!(message(b"#!/bin/sh").contains("no PE file"));
        assert!(message(&example(&[(".text", b"x")])).contains("no section .linux"));
        let mut other = example(&[(".linux", b"x")]);
        other[0x84..0x86].copy_from_slice(&0xaa64_u16.to_le_bytes());
        assert!(message(&other).contains("another machine"));
        let mut cut = example(&[(".linux", &[1; 4096])]);
        cut.truncate(2048);
        assert!(message(&cut).contains("section .linux"));
    }

    proptest! {
        #[test]
        fn any_header_is_read_without_a_panic(
            at in 0usize..0x200, bytes in proptest::collection::vec(any::<u8>(), 0..64),
        ) {
            let mut image = example(&[(".linux", b"x"), (".cmdline", b"y")]);
            for (to, from) in image.iter_mut().skip(at).zip(&bytes) {
                *to = *from;
            }
            let _ = loaded(&image);
        }
    }
}
