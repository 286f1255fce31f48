use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::Path;

use rustix::fs::{AtFlags, CWD, FileType, Mode, Timespec, Timestamps, XattrFlags};

use super::{ImportError, ImportSource, directory};
use crate::erofs::reader;
use crate::{Cancel, Error, Image, Limits, PullOptions, Store, StoreOptions};

fn store() -> (tempfile::TempDir, Store) {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    (dir, store)
}

fn import(store: &Store, path: &Path) -> crate::Result<Image> {
    let source = ImportSource::Directory(path.to_owned());
    store.import(source, None, &PullOptions::default())
}

fn read(image: &Image) -> BTreeMap<Vec<u8>, reader::FileStat> {
    reader::read(&fs::read(image.rootfs()).unwrap())
}

fn set_time(path: &Path, seconds: i64, nanos: u32) {
    let time = Timespec {
        tv_sec: seconds,
        tv_nsec: nanos.into(),
    };
    let times = Timestamps {
        last_access: time,
        last_modification: time,
    };
    rustix::fs::utimensat(CWD, path, &times, AtFlags::SYMLINK_NOFOLLOW).unwrap();
}

/// A directory with one of everything.
fn full() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    fs::create_dir_all(path("etc/deep")).unwrap();
    fs::write(path("etc/hello"), "hello\n").unwrap();
    fs::set_permissions(path("etc/hello"), fs::Permissions::from_mode(0o4751)).unwrap();
    fs::hard_link(path("etc/hello"), path("etc/deep/second")).unwrap();
    symlink("/etc/passwd", path("link")).unwrap();
    symlink("x".repeat(300), path("long-link")).unwrap();
    let fifo = path("fifo");
    rustix::fs::mknodat(CWD, &fifo, FileType::Fifo, Mode::from(0o600), 0).unwrap();
    let name = std::ffi::OsStr::from_bytes(b"not \xff utf-8");
    fs::write(dir.path().join(name), "x").unwrap();
    let long = format!("{}/{}", "d".repeat(200), "f".repeat(200));
    fs::create_dir(path(&"d".repeat(200))).unwrap();
    fs::write(path(&long), "long").unwrap();
    let sparse = File::create(path("sparse")).unwrap();
    sparse.write_all_at(b"middle", 10 << 20).unwrap();
    sparse.set_len(30 << 20).unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(path("socket")).unwrap();
    for (name, value) in [("user.a", b"1".as_slice()), ("user.long", &[7; 3000])] {
        let flags = XattrFlags::empty();
        rustix::fs::setxattr(path("etc/hello"), name, value, flags).unwrap();
    }
    set_time(&path("link"), 1_700_000_000, 123_456_789);
    set_time(&path("sparse"), -2, 500_000_000);
    set_time(&path("etc/deep"), 1 << 34, 0);
    dir
}

#[test]
fn a_directory_becomes_an_image_of_all_that_is_in_it() {
    let source = full();
    let (_dir, store) = store();
    let image = import(&store, source.path()).unwrap();
    let found = read(&image);
    let mut expected = vec![Vec::new()];
    let mut directories = vec![source.path().to_owned()];
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            let metadata = fs::symlink_metadata(&path).unwrap();
            let name = path.strip_prefix(source.path()).unwrap();
            if name == Path::new("socket") {
                continue;
            }
            let name = name.as_os_str().as_bytes().to_vec();
            let inside = found
                .get(&name)
                .unwrap_or_else(|| panic!("{} is missing", path.display()));
            assert_eq!(u32::from(inside.mode), metadata.mode(), "{path:?}");
            assert_eq!((inside.uid, inside.gid), (metadata.uid(), metadata.gid()));
            let mtime = (metadata.mtime(), metadata.mtime_nsec() as u32);
            assert_eq!(inside.mtime, mtime, "{path:?}");
            if metadata.is_dir() {
                directories.push(path);
            } else {
                assert_eq!(u64::from(inside.links), metadata.nlink(), "{path:?}");
                let data = match metadata.is_symlink() {
                    true => fs::read_link(&path)
                        .unwrap()
                        .as_os_str()
                        .as_bytes()
                        .to_vec(),
                    false if metadata.is_file() => fs::read(&path).unwrap(),
                    false => Vec::new(),
                };
                assert!(inside.data == data, "{path:?}");
            }
            expected.push(name);
        }
    }
    expected.sort();
    assert!(found.keys().eq(&expected), "{:?}", found.keys());
    let hello = &found[b"etc/hello".as_slice()];
    assert_eq!(hello.xattrs["user.a"], b"1");
    assert_eq!(hello.xattrs["user.long"], [7; 3000]);
    assert_eq!(hello.nid, found[b"etc/deep/second".as_slice()].nid);
    // Holes are not stored, neither in the layer nor in the file system.
    let blobs = fs::read_dir(store.root().join("blobs/sha256")).unwrap();
    let sizes = blobs.map(|blob| blob.unwrap().metadata().unwrap().len());
    assert!(sizes.max().unwrap() < 1 << 20);
}

#[test]
fn the_same_directory_is_the_same_image_and_may_have_names() {
    let source = full();
    let (_dir, store) = store();
    let first = import(&store, source.path()).unwrap();
    assert_eq!(first.tags(), [""; 0]);
    assert!(first.config().config().as_ref().unwrap().cmd().is_none());
    let named = ImportSource::Directory(source.path().to_owned());
    let options = PullOptions::default();
    let second = store.import(named, Some("app:1"), &options).unwrap();
    assert_eq!(second.id(), first.id());
    assert_eq!(second.tags(), ["docker.io/library/app:1"]);
    assert_eq!(store.list().unwrap().len(), 1);
    let newest = fs::metadata(source.path().join("etc/deep")).unwrap();
    assert_eq!(second.created(), newest.modified().ok());
    let named = ImportSource::Directory(source.path().to_owned());
    assert!(matches!(
        store.import(named, Some("Not A Name"), &options),
        Err(Error::Reference { .. })
    ));
}

#[test]
fn devices_are_kept_where_they_are_allowed() {
    let source = tempfile::tempdir().unwrap();
    let null = source.path().join("null");
    let device = rustix::fs::makedev(1, 3);
    let (kind, mode) = (FileType::CharacterDevice, Mode::from(0o666));
    rustix::fs::mknodat(CWD, &null, kind, mode, device)
        .expect("this test needs the right to make device nodes: run it as root");
    let (_dir, store) = store();
    let image = import(&store, source.path()).unwrap();
    assert_eq!(read(&image)[b"null".as_slice()].device, 0x103);
    let limits = Limits {
        devices: false,
        ..Limits::default()
    };
    let dir = tempfile::tempdir().unwrap();
    let strict = Store::open_with(dir.path(), StoreOptions::default().limits(limits)).unwrap();
    let error = import(&strict, source.path()).unwrap_err();
    let source = std::error::Error::source(&error).unwrap().to_string();
    assert!(source.contains("does not allow"), "{source}");
    assert!(strict.list().unwrap().is_empty());
}

fn import_tar(store: &Store, tar: &[u8]) -> crate::Result<Image> {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(tar).unwrap();
    io::Seek::rewind(&mut file).unwrap();
    store.import(ImportSource::Tar(file), None, &PullOptions::default())
}

fn refused(outcome: crate::Result<Image>) -> ImportError {
    match outcome {
        Err(Error::Import(error)) => error,
        other => panic!("{other:?}"),
    }
}

#[test]
fn what_makes_no_image_is_refused_and_leaves_nothing() {
    let (dir, store) = store();
    let empty = tempfile::tempdir().unwrap();
    assert!(matches!(
        refused(import(&store, empty.path())),
        ImportError::Empty
    ));
    fs::create_dir(empty.path().join(".wh.name")).unwrap();
    assert!(matches!(
        refused(import(&store, empty.path())),
        ImportError::Unfit { .. }
    ));
    let missing = refused(import(&store, Path::new("/no/such/directory")));
    assert!(missing.to_string().contains("/no/such/directory"));
    let file = empty.path().join("file");
    fs::write(&file, "").unwrap();
    assert!(matches!(
        refused(import(&store, &file)),
        ImportError::Read { .. }
    ));
    assert!(matches!(
        refused(import_tar(&store, b"")),
        ImportError::Empty
    ));
    let archive = crate::tarball::Tarball::new()
        .file("manifest.json", 0o644, b"[]")
        .dir("blobs", 0o755)
        .finish();
    assert!(matches!(
        refused(import_tar(&store, &archive)),
        ImportError::Images
    ));
    let error = import_tar(&store, &[b'x'; 2000]).unwrap_err();
    assert!(error.to_string().contains("not a tar archive"), "{error}");
    for hostile in ["../escape", "/../etc/shadow"] {
        let tar = crate::tarball::Tarball::new()
            .file("ok", 0o644, b"")
            .file(hostile, 0o644, b"x")
            .finish();
        let outcome = import_tar(&store, &tar);
        assert!(matches!(outcome, Err(Error::Layer { .. })), "{outcome:?}");
    }
    assert!(store.list().unwrap().is_empty());
    for directory in ["blobs/sha256", "images", "tmp"] {
        let left = fs::read_dir(dir.path().join(directory)).unwrap().count();
        assert_eq!(left, 0, "{directory}");
    }
}

#[test]
fn bounds_hold_for_directories_and_tars() {
    let source = full();
    let refused_with = |limits: Limits| {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open_with(dir.path(), StoreOptions::default().limits(limits)).unwrap();
        let tar = crate::tarball::Tarball::new()
            .file("a", 0o644, &[0; 5000])
            .file("b", 0o644, &[0; 5000])
            .file("c", 0o644, &[0; 5000])
            .finish();
        for outcome in [import(&store, source.path()), import_tar(&store, &tar)] {
            let error = refused(outcome);
            assert!(matches!(error, ImportError::Limit { .. }), "{error}");
        }
    };
    refused_with(Limits {
        entries: 2,
        ..Limits::default()
    });
    refused_with(Limits {
        unpacked_bytes: 10_000,
        ..Limits::default()
    });
}

/// Runs a function when data with a certain byte is written.
struct Meddler<F>(u8, Option<F>);

impl<F: FnOnce()> Write for Meddler<F> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if bytes.ends_with(&[self.0])
            && let Some(meddle) = self.1.take()
        {
            meddle();
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Returns when a new change would get a later time than one from before: file timestamps advance
/// in milliseconds.
fn tick() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let time = || {
        file.as_file().write_all_at(b"x", 0).unwrap();
        file.as_file().metadata().unwrap().modified().unwrap()
    };
    let before = time();
    while time() == before {}
}

/// Reads a directory in which `meddle` runs when the file of bytes `at` is read: 1 before the inner
/// directory, 3 in it.
fn meddled(at: u8, meddle: impl Fn(&Path)) -> Option<ImportError> {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    fs::write(path("a"), [1; 1000]).unwrap();
    fs::create_dir(path("directory")).unwrap();
    fs::write(path("directory/b"), [2; 1000]).unwrap();
    fs::write(path("directory/c"), [3; 1000]).unwrap();
    tick();
    let mut out = Meddler(at, Some(|| meddle(dir.path())));
    let limits = Limits::default();
    let written = directory::write(dir.path(), &mut out, &limits, &Cancel::default());
    assert!(out.1.is_none(), "nothing happened");
    match written {
        Ok(_) => None,
        Err(Error::Import(error)) => Some(error),
        Err(error) => panic!("{error:?}"),
    }
}

#[test]
fn a_directory_that_changes_meanwhile_is_refused() {
    assert!(meddled(3, |_| ()).is_none());
    type Case<'a> = (u8, &'a dyn Fn(&Path));
    let cases: [Case<'_>; 11] = [
        (3, &|root| fs::write(root.join("a"), "other").unwrap()),
        (3, &|root| {
            fs::write(root.join("directory/b"), [9; 1000]).unwrap()
        }),
        (3, &|root| {
            fs::write(root.join("directory/c"), [9; 1000]).unwrap()
        }),
        (3, &|root| {
            fs::write(root.join("directory/c"), "short").unwrap()
        }),
        (1, &|root| fs::write(root.join("a"), [9; 2000]).unwrap()),
        (3, &|root| {
            fs::write(root.join("directory/new"), "").unwrap()
        }),
        (1, &|root| fs::write(root.join("new"), "").unwrap()),
        (3, &|root| {
            fs::remove_file(root.join("directory/c")).unwrap()
        }),
        (1, &|root| {
            fs::remove_dir_all(root.join("directory")).unwrap()
        }),
        (1, &|root| {
            fs::remove_dir_all(root.join("directory")).unwrap();
            symlink("/etc", root.join("directory")).unwrap();
        }),
        (3, &|root| {
            fs::set_permissions(root.join("a"), fs::Permissions::from_mode(0o777)).unwrap();
        }),
    ];
    for (number, (at, case)) in cases.into_iter().enumerate() {
        let error = meddled(at, case);
        assert!(
            matches!(error, Some(ImportError::Changed { .. })),
            "{number}: {error:?}"
        );
    }
}
