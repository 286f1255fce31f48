//! Renames the members of a tar archive while it passes, which not every `tar` can do.
//!
//! The archive is that of the host's `tar`, of any make: names are in headers, in GNU's long names
//! or in POSIX' extended records. All but the members' names, and the targets of hard links, passes
//! as it is.

use std::io::{self, Read, Write};

use tar::{EntryType, Header, PaxExtensions};

/// Bytes of a header, and the unit of padding.
const BLOCK: usize = 512;

/// Maximum bytes of a name in a header.
const NAME: usize = 100;

/// Maximum bytes of a long name, or of the extended records of one member.
const MAX_EXTENSION: u64 = 1 << 20;

/// Renames a member of a directory, and what is below it.
#[derive(Debug)]
pub(super) struct Rename {
    /// `.` stands for the directory itself.
    old: Vec<u8>,
    new: Vec<u8>,
}

/// Keys and values of POSIX' extended header.
type Records = Vec<(Vec<u8>, Vec<u8>)>;

/// What precedes a member's header.
#[derive(Debug, Default)]
struct Extensions {
    /// GNU's long name, and long target of a link.
    name: Option<Vec<u8>>,
    link: Option<Vec<u8>>,
    /// POSIX' records with their header.
    records: Option<(Header, Records)>,
}

impl Rename {
    pub(super) fn new(old: &str, new: &str) -> Self {
        Self {
            old: old.into(),
            new: new.into(),
        }
    }

    /// Passes the archive on.
    ///
    /// # Errors
    /// The archive ends early or has a member that is not below the old name, or a file fails.
    pub(super) fn pass(&self, mut from: impl Read, mut to: impl Write) -> io::Result<()> {
        let mut extensions = Extensions::default();
        loop {
            let mut block = [0; BLOCK];
            from.read_exact(&mut block)?;
            if block == [0; BLOCK] {
                to.write_all(&block)?;
                io::copy(&mut from, &mut to)?;
                return Ok(());
            }
            let header = Header::from_byte_slice(&block).clone();
            let size = header.entry_size()?;
            match header.entry_type() {
                EntryType::GNULongName => extensions.name = Some(text(&mut from, size)?),
                EntryType::GNULongLink => extensions.link = Some(text(&mut from, size)?),
                EntryType::XHeader => {
                    let bytes = extension(&mut from, size)?;
                    let records = PaxExtensions::new(&bytes).map(|record| {
                        let record = record?;
                        Ok((record.key_bytes().to_vec(), record.value_bytes().to_vec()))
                    });
                    extensions.records = Some((header, records.collect::<io::Result<_>>()?));
                }
                EntryType::XGlobalHeader => {
                    to.write_all(header.as_bytes())?;
                    data(&mut from, &mut to, size)?;
                }
                // Its map goes on behind the header.
                EntryType::GNUSparse => return Err(invalid("it has a sparse file".to_owned())),
                _ => {
                    let extensions = std::mem::take(&mut extensions);
                    let size = extensions.size()?.unwrap_or(size);
                    self.member(header, extensions, &mut to)?;
                    data(&mut from, &mut to, size)?;
                }
            }
        }
    }

    /// Writes the header of a member and what precedes it.
    fn member(
        &self,
        mut header: Header,
        extensions: Extensions,
        to: &mut impl Write,
    ) -> io::Result<()> {
        let Extensions {
            name,
            mut link,
            mut records,
        } = extensions;
        let is_hard_link = header.entry_type() == EntryType::Link;
        let path = records.as_ref().and_then(|(_, list)| value(list, b"path"));
        let old = path
            .or(name.as_deref())
            .map_or_else(|| header.path_bytes().into_owned(), <[u8]>::to_vec);
        let Some(new) = self.renamed(&old) else {
            let old = String::from_utf8_lossy(&old);
            return Err(invalid(format!("it has `{old}`, which was not asked for")));
        };
        if is_hard_link {
            let target = link
                .take()
                .or_else(|| header.link_name_bytes().map(Into::into));
            let target = target.and_then(|target| self.renamed(&target));
            link = target.inspect(|target| fill(&mut header.as_old_mut().linkname, target));
        }
        if let Some((_, list)) = &mut records {
            for (key, value) in list.iter_mut() {
                let is_name = key == b"path" || key == b"GNU.sparse.name";
                if (is_name || key == b"linkpath" && is_hard_link)
                    && let Some(new) = self.renamed(value)
                {
                    *value = new;
                }
            }
            let has_path = value(list, b"path").is_some();
            if !has_path && new.len() > NAME {
                list.push((b"path".to_vec(), new.clone()));
            }
        }
        fill(&mut header.as_old_mut().name, &new);
        if let Some(ustar) = header.as_ustar_mut() {
            ustar.prefix.fill(0);
        }
        header.set_cksum();
        match records {
            Some((own, list)) => write_records(own, &list, to)?,
            None if new.len() > NAME => write_long(EntryType::GNULongName, &new, to)?,
            None => {}
        }
        if let Some(link) = link.filter(|link| link.len() > NAME) {
            write_long(EntryType::GNULongLink, &link, to)?;
        }
        to.write_all(header.as_bytes())
    }

    /// Returns the new name of a member; `None` if it is not below the old name.
    fn renamed(&self, name: &[u8]) -> Option<Vec<u8>> {
        let inner = name.strip_prefix(b"./");
        let rest = match (self.old.as_slice(), inner) {
            (b".", _) => name.strip_prefix(b".")?,
            (old, inner) => inner.unwrap_or(name).strip_prefix(old)?,
        };
        (rest.is_empty() || rest.starts_with(b"/")).then(|| [&self.new, rest].concat())
    }
}

impl Extensions {
    /// Returns the size of the member's data, if it does not fit its header.
    fn size(&self) -> io::Result<Option<u64>> {
        let list = self.records.as_ref().map(|(_, list)| list.as_slice());
        let Some(size) = value(list.unwrap_or_default(), b"size") else {
            return Ok(None);
        };
        let size = str::from_utf8(size).ok().and_then(|size| size.parse().ok());
        let size = size.ok_or_else(|| invalid("a size in it is no number".to_owned()))?;
        Ok(Some(size))
    }
}

/// Returns the value of a record.
fn value<'a>(records: &'a [(Vec<u8>, Vec<u8>)], key: &[u8]) -> Option<&'a [u8]> {
    let mut found = records.iter().filter(|(own, _)| own == key);
    found.next_back().map(|(_, value)| value.as_slice())
}

/// Reads the data of an extension.
fn extension(from: &mut impl Read, size: u64) -> io::Result<Vec<u8>> {
    if size > MAX_EXTENSION {
        return Err(invalid(format!("it has a name of {size} bytes")));
    }
    let mut bytes = Vec::new();
    data(from, &mut bytes, size)?;
    bytes.truncate(usize::try_from(size).unwrap_or(usize::MAX));
    Ok(bytes)
}

/// Reads a long name, which a zero ends.
fn text(from: &mut impl Read, size: u64) -> io::Result<Vec<u8>> {
    let mut bytes = extension(from, size)?;
    let end = bytes.iter().position(|byte| *byte == 0);
    bytes.truncate(end.unwrap_or(bytes.len()));
    Ok(bytes)
}

/// Passes data of this size with its padding.
fn data(from: &mut impl Read, to: &mut impl Write, size: u64) -> io::Result<()> {
    let padded = size.next_multiple_of(BLOCK as u64);
    match io::copy(&mut from.take(padded), to)? == padded {
        true => Ok(()),
        false => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

/// Fills a field with as much of a text as it has room for.
fn fill(field: &mut [u8; NAME], text: &[u8]) {
    field.fill(0);
    for (field, byte) in field.iter_mut().zip(text) {
        *field = *byte;
    }
}

fn write_long(kind: EntryType, text: &[u8], to: &mut impl Write) -> io::Result<()> {
    let mut header = Header::new_gnu();
    fill(&mut header.as_old_mut().name, b"././@LongLink");
    header.set_entry_type(kind);
    header.set_mode(0o644);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    write_extension(header, &[text, b"\0"].concat(), to)
}

fn write_records(
    header: Header,
    records: &[(Vec<u8>, Vec<u8>)],
    to: &mut impl Write,
) -> io::Result<()> {
    let mut bytes = Vec::new();
    for (key, value) in records {
        // `LENGTH KEY=VALUE\n`, where LENGTH counts all of it.
        let rest = key.len() + value.len() + 3;
        let mut length = rest + rest.to_string().len();
        length = rest + length.to_string().len();
        bytes.extend_from_slice(format!("{length} ").as_bytes());
        bytes.extend_from_slice(key);
        bytes.push(b'=');
        bytes.extend_from_slice(value);
        bytes.push(b'\n');
    }
    write_extension(header, &bytes, to)
}

fn write_extension(mut header: Header, bytes: &[u8], to: &mut impl Write) -> io::Result<()> {
    header.set_size(bytes.len() as u64);
    header.set_cksum();
    to.write_all(header.as_bytes())?;
    to.write_all(bytes)?;
    let padding = bytes.len().next_multiple_of(BLOCK) - bytes.len();
    to.write_all(&vec![0; padding])
}

fn invalid(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::{MetadataExt as _, symlink};
    use std::path::Path;
    use std::process::{Command, Stdio};

    /// How the archives of different hosts are made.
    const PACKERS: [&[&str]; 4] = [
        &["tar", "-c"],
        &["tar", "-c", "--format=pax"],
        &["tar", "-c", "--format=ustar"],
        &["busybox", "tar", "-c"],
    ];

    /// Packs `old` below a directory, renames it, and unpacks it by a guest's `tar`.
    fn copy(packer: &[&str], from: &Path, old: &str, new: &str, to: &Path) {
        let packed = Command::new(packer[0])
            .args(&packer[1..])
            .args(["-f", "-", "-C"])
            .arg(from)
            .args(["--", old])
            .output()
            .unwrap();
        assert!(packed.status.success(), "{packed:?}");
        let mut renamed = Vec::new();
        let rename = Rename::new(old.strip_prefix("./").unwrap_or(old), new);
        rename.pass(packed.stdout.as_slice(), &mut renamed).unwrap();
        for unpacker in [&["tar"][..], &["busybox", "tar"]] {
            let to = to.join(unpacker.concat());
            fs::create_dir(&to).unwrap();
            let mut unpack = Command::new(unpacker[0])
                .args(&unpacker[1..])
                .args(["-x", "-f", "-", "-C"])
                .arg(&to)
                .stdin(Stdio::piped())
                .spawn()
                .unwrap();
            unpack.stdin.take().unwrap().write_all(&renamed).unwrap();
            assert!(unpack.wait().unwrap().success(), "{packer:?} {unpacker:?}");
        }
    }

    #[test]
    fn names_and_hard_links_are_renamed_and_nothing_else() {
        let long = "long".repeat(30);
        for (packer, index) in PACKERS.into_iter().zip(0..) {
            let dir = tempfile::tempdir().unwrap();
            let from = dir.path().join("from");
            let old = from.join("a.b*[1]");
            fs::create_dir_all(old.join("sub")).unwrap();
            fs::write(old.join("sub/file"), vec![index; 100_000]).unwrap();
            symlink("a.b*[1]/x", old.join("link")).unwrap();
            fs::hard_link(old.join("sub/file"), old.join("twin")).unwrap();
            // POSIX' oldest format has no room for it.
            let has_long = !packer.contains(&"--format=ustar");
            if has_long {
                fs::write(old.join(&long), "long").unwrap();
                fs::hard_link(old.join(&long), old.join("long-twin")).unwrap();
                symlink(&long, old.join("long-link")).unwrap();
            }
            for (number, (old, new)) in [
                ("a.b*[1]", "n&w|".to_owned()),
                ("./a.b*[1]", "new".repeat(50)),
            ]
            .into_iter()
            .enumerate()
            {
                let to = dir.path().join(format!("to{number}"));
                fs::create_dir(&to).unwrap();
                copy(packer, &from, old, &new, &to);
                for tar in ["tar", "busyboxtar"] {
                    let to = to.join(tar);
                    assert_eq!(fs::read_dir(&to).unwrap().count(), 1, "{packer:?}");
                    let at = |name: &str| to.join(&new).join(name);
                    assert_eq!(fs::read(at("sub/file")).unwrap(), vec![index; 100_000]);
                    assert_eq!(fs::read_link(at("link")).unwrap(), Path::new("a.b*[1]/x"));
                    let inode = |name| fs::metadata(at(name)).unwrap().ino();
                    assert_eq!(inode("twin"), inode("sub/file"), "{packer:?} {tar}");
                    if has_long {
                        assert_eq!(fs::read(at(&long)).unwrap(), b"long");
                        assert_eq!(inode("long-twin"), inode(&long), "{packer:?} {tar}");
                        assert_eq!(fs::read_link(at("long-link")).unwrap(), Path::new(&long));
                    }
                }
            }
        }
    }

    #[test]
    fn what_is_in_a_directory_gets_a_directory_of_the_new_name() {
        for packer in PACKERS {
            let dir = tempfile::tempdir().unwrap();
            let [from, to] = ["from", "to"].map(|name| dir.path().join(name));
            for made in [&from, &to] {
                fs::create_dir(made).unwrap();
            }
            fs::write(from.join(".hidden"), "x").unwrap();
            copy(packer, &from, ".", "new", &to);
            assert_eq!(fs::read(to.join("tar/new/.hidden")).unwrap(), b"x");
        }
    }

    #[test]
    fn an_archive_that_ends_early_or_has_other_files_is_an_error() {
        let mut archive = tar::Builder::new(Vec::new());
        let mut header = Header::new_gnu();
        header.set_size(4);
        archive
            .append_data(&mut header, "old/file", &b"data"[..])
            .unwrap();
        let archive = archive.into_inner().unwrap();
        let pass = |old: &str, bytes: &[u8]| {
            let passed = Rename::new(old, "new").pass(bytes, io::sink());
            passed.map_err(|error| error.kind())
        };
        assert_eq!(pass("old", &archive), Ok(()));
        for end in [0, 100, 512, 600] {
            let error = Err(io::ErrorKind::UnexpectedEof);
            assert_eq!(pass("old", &archive[..end]), error, "{end}");
        }
        for other in ["ol", "old/file/x", "file"] {
            let error = Err(io::ErrorKind::InvalidData);
            assert_eq!(pass(other, &archive), error, "{other}");
        }
    }
}
