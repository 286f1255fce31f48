//! A listing of a directory: what each file in it is, in words that can be compared.
//!
//! One line per file: its path, then `name=value` pairs, all apart by tabs. In paths and values
//! every byte that is not printable ASCII, and the backslash, is written `\ooo`.

use std::ffi::{OsStr, OsString};
use std::fmt::Write as _;
use std::fs;
use std::io::Write as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use rustix::fs::{FileType, lgetxattr, llistxattr, major, minor};

/// What an unprivileged view of a file shows of its attributes.
const ATTRIBUTES: [&[u8]; 3] = [b"user.", b"security.", b"system.posix_acl_"];

/// Lists everything below `root` and `root` itself, sorted by path.
pub(super) fn list(root: &Path) -> Result<String> {
    let mut lines = Vec::new();
    let mut directories = vec![PathBuf::new()];
    let mut files = Vec::new();
    lines.push((PathBuf::new(), describe(root)?));
    while let Some(directory) = directories.pop() {
        let path = root.join(&directory);
        for entry in
            fs::read_dir(&path).with_context(|| format!("{} cannot be read", path.display()))?
        {
            let entry = entry?;
            let relative = directory.join(entry.file_name());
            lines.push((relative.clone(), describe(&entry.path())?));
            let kind = entry.file_type()?;
            if kind.is_dir() {
                directories.push(relative);
            } else if kind.is_file() {
                files.push((lines.len() - 1, relative));
            }
        }
    }
    for ((index, _), sum) in files.iter().zip(checksums(root, &files)?) {
        let _ = write!(lines[*index].1, "\tsha256={sum}");
    }
    lines.sort();
    let line = |(path, rest): &(PathBuf, String)| {
        format!("/{}{rest}\n", escape(path.as_os_str().as_bytes()))
    };
    Ok(lines.iter().map(line).collect())
}

fn describe(path: &Path) -> Result<String> {
    let fault = || format!("{} cannot be read", path.display());
    let meta = fs::symlink_metadata(path).with_context(fault)?;
    let kind = match FileType::from_raw_mode(meta.mode()) {
        FileType::RegularFile => "f",
        FileType::Directory => "d",
        FileType::Symlink => "l",
        FileType::CharacterDevice => "c",
        FileType::BlockDevice => "b",
        FileType::Fifo => "p",
        _ => bail!(
            "{} is of a kind that no image has; remove it",
            path.display()
        ),
    };
    let mut text = format!(
        "\ttype={kind}\tmode={:04o}\tuid={}\tgid={}\tlinks={}\tmtime={}.{:09}",
        meta.mode() & 0o7777,
        meta.uid(),
        meta.gid(),
        meta.nlink(),
        meta.mtime(),
        meta.mtime_nsec(),
    );
    match kind {
        "f" => text.push_str(&format!("\tsize={}", meta.size())),
        "c" | "b" => text.push_str(&format!(
            "\tdevice={:x}:{:x}",
            major(meta.rdev()),
            minor(meta.rdev())
        )),
        "l" => {
            let target = fs::read_link(path).with_context(fault)?;
            text.push_str(&format!(
                "\ttarget={}",
                escape(target.as_os_str().as_bytes())
            ));
        }
        _ => {}
    }
    for (name, value) in attributes(path).with_context(fault)? {
        let _ = write!(text, "\t{}=0x", escape(&name));
        value.iter().for_each(|byte| {
            let _ = write!(text, "{byte:02x}");
        });
    }
    Ok(text)
}

/// Extended attributes, sorted by name.
fn attributes(path: &Path) -> Result<Vec<(Vec<u8>, Vec<u8>)>> {
    let mut buffer = vec![0; 64 << 10];
    let length = llistxattr(path, &mut buffer[..])?;
    let names = buffer[..length].to_vec();
    let mut found = Vec::new();
    for name in names.split(|byte| *byte == 0) {
        if ATTRIBUTES.iter().any(|prefix| name.starts_with(prefix)) {
            let length = lgetxattr(path, OsStr::from_bytes(name), &mut buffer[..])?;
            found.push((name.to_vec(), buffer[..length].to_vec()));
        }
    }
    found.sort();
    Ok(found)
}

/// The SHA-256 of each file, by `sha256sum`.
fn checksums(root: &Path, files: &[(usize, PathBuf)]) -> Result<Vec<String>> {
    if files.is_empty() {
        return Ok(Vec::new());
    }
    let mut child = Command::new("xargs")
        .args(["-0", "sha256sum", "--zero", "--"])
        .current_dir(root)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .context("`xargs` cannot be started")?;
    let mut stdin = child.stdin.take().context("no stdin")?;
    let mut names = OsString::new();
    for (_, file) in files {
        names.push("./");
        names.push(file);
        names.push("\0");
    }
    // What is written and what is read wait for each other otherwise.
    let writer = std::thread::spawn(move || stdin.write_all(names.as_bytes()));
    let output = child.wait_with_output()?;
    if !output.status.success() || writer.join().is_err() {
        bail!("`sha256sum` failed ({})", output.status);
    }
    let sums: Vec<String> = output
        .stdout
        .split(|byte| *byte == 0)
        .filter(|line| !line.is_empty())
        .map(|line| String::from_utf8_lossy(&line[..line.len().min(64)]).into_owned())
        .collect();
    if sums.len() != files.len() {
        bail!(
            "`sha256sum` gave {} sums for {} files",
            sums.len(),
            files.len()
        );
    }
    Ok(sums)
}

fn escape(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        match byte {
            b'\\' | 0..0x20 | 0x7f.. => {
                let _ = write!(text, "\\{byte:03o}");
            }
            byte => text.push(char::from(*byte)),
        }
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::TempDir;
    use std::os::unix::fs::symlink;

    #[test]
    fn every_kind_of_file_is_described() {
        let dir = TempDir::new("listing").unwrap();
        let path = |name: &str| dir.path().join(name);
        fs::write(path("a"), "text").unwrap();
        fs::hard_link(path("a"), path("b\n")).unwrap();
        symlink("to\\x", path("link")).unwrap();
        fs::create_dir(path("empty")).unwrap();
        let listing = list(dir.path()).unwrap();
        let lines: Vec<&str> = listing.lines().collect();
        let has = |line: &str, words: &[&str]| words.iter().all(|word| line.contains(word));
        assert_eq!(lines.len(), 5, "{listing}");
        assert!(has(lines[0], &["/\ttype=d", "links=3"]), "{listing}");
        let sum = "sha256=982d9e3eb996f559e633f4d194def3761d909f5a3b647d1a851fead67c32c9d1";
        assert!(
            has(lines[1], &["/a\ttype=f", "links=2", "size=4", sum]),
            "{listing}"
        );
        assert!(has(lines[2], &["/b\\012\ttype=f", sum]), "{listing}");
        assert!(has(lines[3], &["/empty\ttype=d", "links=2"]), "{listing}");
        assert!(
            has(lines[4], &["/link\ttype=l", "target=to\\134x"]),
            "{listing}"
        );
    }
}
