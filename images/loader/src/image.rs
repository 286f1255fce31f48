//! The files of an entry: opened, checked, and joined where Linux takes only one.

use std::fs::{self, File, OpenOptions};
use std::io::{Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::FileExt as _;

use podvisor_boot_entries::kernel::{self, HEADER_BYTES, KernelHeader};
use podvisor_boot_entries::{BootEntry, FileRef};

use crate::console::say;
use crate::error::LoaderError;
use crate::machine::SCRATCH;
use crate::trees::Trees;

/// A file with the part of it that is meant.
#[derive(Debug)]
struct Opened {
    file: File,
    offset: u64,
    len: u64,
    is_whole: bool,
}

/// A kernel and its initial file systems, each one file.
#[derive(Debug)]
pub(crate) struct Image {
    pub(crate) kernel: File,
    pub(crate) initrd: Option<File>,
    pub(crate) header: KernelHeader,
    pub(crate) name: String,
    kernel_bytes: u64,
    initrd_bytes: u64,
    /// What of it was copied to memory before it is loaded.
    copied_bytes: u64,
}

/// Opens the files of an entry. Parts of files, and several initial file systems, are copied.
pub(crate) fn open(trees: &Trees, entry: &BootEntry) -> Result<Image, LoaderError> {
    let name = trees.name(&entry.kernel);
    let kernel = opened(trees, entry, &entry.kernel)?;
    let mut start = vec![0; HEADER_BYTES.min(usize::try_from(kernel.len).unwrap_or(usize::MAX))];
    let read = kernel.file.read_exact_at(&mut start, kernel.offset);
    read.map_err(|error| fails(trees, entry, &entry.kernel, &error.to_string()))?;
    let header = kernel::check(&start, kernel.len).map_err(|source| LoaderError::Kernel {
        file: name.clone(),
        title: entry.title.clone(),
        source,
    })?;
    let mut initrds = Vec::new();
    for file in &entry.initrds {
        initrds.push((file, opened(trees, entry, file)?));
    }
    let kernel_bytes = kernel.len;
    let initrd_bytes = initrds
        .iter()
        .map(|(_, initrd)| initrd.len.next_multiple_of(4))
        .sum();
    let names: Vec<String> = entry.initrds.iter().map(|file| trees.name(file)).collect();
    say(&format!(
        "kernel {name} ({}), initial file system {} ({})",
        size(kernel_bytes),
        if names.is_empty() {
            "none".to_owned()
        } else {
            names.join(", ")
        },
        size(initrd_bytes),
    ));
    let mut image = Image {
        kernel: kernel.file.try_clone().map_err(LoaderError::copy)?,
        initrd: None,
        header,
        name,
        kernel_bytes,
        initrd_bytes,
        copied_bytes: 0,
    };
    let is_one = initrds.len() == 1 && initrds.iter().all(|(_, initrd)| initrd.is_whole);
    if !kernel.is_whole {
        image.copied_bytes += kernel_bytes;
    }
    if !is_one {
        image.copied_bytes += initrd_bytes;
    }
    check_memory(&image)?;
    if !kernel.is_whole {
        image.kernel = copy("kernel", &[(&entry.kernel, kernel)], trees, entry)?;
    }
    image.initrd = match initrds.pop() {
        None => None,
        Some((_, initrd)) if is_one => Some(initrd.file),
        Some(last) => {
            initrds.push(last);
            Some(copy("initrd", &initrds, trees, entry)?)
        }
    };
    // What was copied is counted by the memory that is left.
    image.copied_bytes = 0;
    Ok(image)
}

fn opened(trees: &Trees, entry: &BootEntry, file: &FileRef) -> Result<Opened, LoaderError> {
    let fails = |reason: String| fails(trees, entry, file, &reason);
    let opened = trees
        .open(file.volume, &file.path)
        .map_err(|error| fails(error.reason))?;
    let len = opened
        .metadata()
        .map_err(|error| fails(error.to_string()))?
        .len();
    Ok(match file.part {
        None => Opened {
            file: opened,
            offset: 0,
            len,
            is_whole: true,
        },
        Some(part) => Opened {
            file: opened,
            offset: part.offset,
            len: part.len,
            is_whole: false,
        },
    })
}

fn fails(trees: &Trees, entry: &BootEntry, file: &FileRef, reason: &str) -> LoaderError {
    LoaderError::File {
        file: trees.name(file),
        title: entry.title.clone(),
        reason: reason.to_owned(),
    }
}

/// Joins parts of files in memory, each from a multiple of four bytes on, as Linux wants archives.
fn copy(
    name: &str,
    parts: &[(&FileRef, Opened)],
    trees: &Trees,
    entry: &BootEntry,
) -> Result<File, LoaderError> {
    let path = format!("{SCRATCH}/{name}");
    let mut out = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .open(&path)
        .map_err(LoaderError::copy)?;
    let mut written = 0_u64;
    for (source, part) in parts {
        let failed = |error: std::io::Error| fails(trees, entry, source, &error.to_string());
        let mut from = &part.file;
        from.seek(SeekFrom::Start(part.offset)).map_err(failed)?;
        let mut from = std::io::Read::take(from, part.len);
        written += std::io::copy(&mut from, &mut out).map_err(failed)?;
        let padding = written.next_multiple_of(4) - written;
        let zeros = usize::try_from(padding).unwrap_or(0);
        out.write_all(&[0; 4][..zeros.min(4)]).map_err(failed)?;
        written += padding;
    }
    drop(out);
    // Linux loads no file that is open to be written.
    File::open(&path).map_err(LoaderError::copy)
}

/// The loader's kernel holds both files twice while it loads them: as they are, and in the pages
/// from which they go to their places.
pub(crate) fn check_memory(image: &Image) -> Result<(), LoaderError> {
    const RESERVE: u64 = 8 << 20;
    let loaded = image.kernel_bytes.saturating_add(image.initrd_bytes);
    let needed = loaded
        .saturating_mul(2)
        .saturating_add(image.copied_bytes)
        .saturating_add(RESERVE)
        .max(u64::from(image.header.init_bytes).saturating_add(image.initrd_bytes));
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let Some(available) = available(&text) else {
        return Ok(());
    };
    if available >= needed {
        return Ok(());
    }
    Err(LoaderError::Memory {
        kernel: size(image.kernel_bytes),
        initrds: size(image.initrd_bytes),
        needed: size(needed),
        available: size(available),
    })
}

fn available(meminfo: &str) -> Option<u64> {
    let line = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.split_whitespace().next()?.parse().ok()?;
    kib.checked_mul(1024)
}

fn size(bytes: u64) -> String {
    if bytes < 1 << 20 {
        return format!("{bytes} bytes");
    }
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}

impl LoaderError {
    fn copy(source: std::io::Error) -> Self {
        Self::Load {
            file: "a copy in memory".to_owned(),
            source,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_told_and_available_memory_is_read() {
        assert_eq!(size(17), "17 bytes");
        assert_eq!(size(3 << 19), "1.5 MiB");
        let text = "MemTotal:  100 kB\nMemFree:  9 kB\nMemAvailable:     50 kB\n";
        assert_eq!(available(text), Some(50 << 10));
        assert_eq!(available(""), None);
    }
}
