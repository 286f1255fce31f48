//! Keys by which users may log in (`~/.ssh/authorized_keys`).
//!
//! The file is the user's own, so everything is done with the user's rights: what the user has put
//! in its place, such as a link to a file of the system, is no more than the user could reach.

use std::fs::{DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::text::MAX_FILE;
use super::{sys, users};
use crate::protocol::{Fault, Keys};

/// The file, and what is written before it takes its place.
const FILE: &str = "authorized_keys";
const PARTIAL: &str = ".authorized_keys.podvisor";

/// What is in the file.
fn read(directory: &Path) -> io::Result<String> {
    let opened = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
        .open(directory.join(FILE));
    let file = match opened {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(String::new()),
        opened => opened?,
    };
    let metadata = file.metadata()?;
    if !metadata.is_file() || metadata.len() > MAX_FILE {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut text = String::new();
    file.take(MAX_FILE).read_to_string(&mut text)?;
    Ok(text)
}

fn write(directory: &Path, text: &str) -> io::Result<()> {
    match DirBuilder::new().mode(0o700).create(directory) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        created => created?,
    }
    let partial = directory.join(PARTIAL);
    // Left by one that was cut off.
    let _ = std::fs::remove_file(&partial);
    let mut file: File = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&partial)?;
    file.set_permissions(Permissions::from_mode(0o600))?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    std::fs::rename(&partial, directory.join(FILE))
}

/// Does something with a user's directory of keys, with the user's rights.
fn of_user<T>(
    root: &Path,
    name: &str,
    what: impl FnOnce(&Path) -> io::Result<T>,
) -> Result<T, Fault> {
    let user = users::find(root, name)?;
    let home = user.home.to_string_lossy();
    let directory: PathBuf = root.join(home.trim_start_matches('/')).join(".ssh");
    let done = sys::as_user(user.uid, user.gid, || what(&directory));
    let shown = format!("{home}/.ssh/{FILE}");
    done.map_err(|error| Fault::io("change or read the keys in", &shown, &error))
}

/// Whether it can be a line of the file.
fn check(keys: &[String]) -> Result<(), Fault> {
    let is_key = |key: &String| {
        !key.trim().is_empty() && !key.starts_with('#') && !key.contains(['\n', '\r'])
    };
    match keys.iter().all(is_key) {
        true => Ok(()),
        false => Err(Fault::new(
            "a key is one line, and neither empty nor a comment",
        )),
    }
}

pub(super) fn get(root: &Path, user: &str) -> Result<Value, Fault> {
    let text = of_user(root, user, read)?;
    let lines = text.lines().map(str::trim);
    let keys = lines.filter(|line| !line.is_empty() && !line.starts_with('#'));
    Ok(json!({ "keys": keys.collect::<Vec<_>>() }))
}

pub(super) fn add(root: &Path, wanted: &Keys) -> Result<Value, Fault> {
    check(&wanted.keys)?;
    of_user(root, &wanted.username, |directory| {
        let mut text = match wanted.reset {
            true => String::new(),
            false => read(directory)?,
        };
        for key in &wanted.keys {
            if text.lines().any(|line| line.trim() == key.trim()) {
                continue;
            }
            if !text.is_empty() && !text.ends_with('\n') {
                text.push('\n');
            }
            text.push_str(key.trim());
            text.push('\n');
        }
        write(directory, &text)
    })?;
    Ok(json!({}))
}

pub(super) fn remove(root: &Path, wanted: &Keys) -> Result<Value, Fault> {
    if wanted.reset {
        return Err(Fault::new("reset has no meaning for keys that are removed"));
    }
    of_user(root, &wanted.username, |directory| {
        let text = read(directory)?;
        let stays = |line: &&str| !wanted.keys.iter().any(|key| key.trim() == line.trim());
        let left: String = text
            .lines()
            .filter(stays)
            .flat_map(|line| [line, "\n"])
            .collect();
        match left == text {
            true => Ok(()),
            false => write(directory, &left),
        }
    })?;
    Ok(json!({}))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use super::*;

    const ONE: &str = "ssh-ed25519 AAAA1 me@here";
    const TWO: &str = "ssh-ed25519 AAAA2 me@there";

    /// A system whose user `me` is the one that runs this test.
    fn system() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let metadata = std::fs::metadata(dir.path()).unwrap();
        std::fs::create_dir_all(dir.path().join("etc")).unwrap();
        std::fs::create_dir_all(dir.path().join("home/me")).unwrap();
        let line = format!(
            "me:x:{}:{}::/home/me:/bin/sh\n",
            metadata.uid(),
            metadata.gid()
        );
        std::fs::write(dir.path().join("etc/passwd"), line).unwrap();
        dir
    }

    fn keys(keys: &[&str], reset: bool) -> Keys {
        Keys {
            username: "me".to_owned(),
            keys: keys.iter().map(|key| (*key).to_owned()).collect(),
            reset,
        }
    }

    #[test]
    fn keys_are_added_once_listed_and_removed() {
        let dir = system();
        let root = dir.path();
        assert_eq!(get(root, "me").unwrap(), json!({ "keys": [] }));
        add(root, &keys(&[ONE, TWO, ONE], false)).unwrap();
        add(root, &keys(&[ONE], false)).unwrap();
        assert_eq!(get(root, "me").unwrap(), json!({ "keys": [ONE, TWO] }));
        let file = root.join("home/me/.ssh/authorized_keys");
        let mode = |path: &Path| std::fs::metadata(path).unwrap().mode() & 0o777;
        assert_eq!((mode(&file), mode(file.parent().unwrap())), (0o600, 0o700));
        // The user's own lines stay as they are.
        std::fs::write(&file, format!("# mine\n{ONE}\n{TWO}")).unwrap();
        remove(root, &keys(&[ONE], false)).unwrap();
        assert_eq!(
            std::fs::read_to_string(&file).unwrap(),
            format!("# mine\n{TWO}\n")
        );
        add(root, &keys(&[ONE], true)).unwrap();
        assert_eq!(get(root, "me").unwrap(), json!({ "keys": [ONE] }));
    }

    #[test]
    fn lines_that_are_no_keys_are_refused() {
        let dir = system();
        for bad in ["", " ", "# x", "a\nb", "a\rb"] {
            add(dir.path(), &keys(&[bad], false)).unwrap_err();
        }
        assert!(!dir.path().join("home/me/.ssh").exists());
        let nobody = Keys {
            username: "nobody-here".to_owned(),
            ..keys(&[ONE], false)
        };
        let fault = add(dir.path(), &nobody).unwrap_err();
        assert!(fault.desc.contains("nobody-here"), "{fault}");
    }

    #[test]
    fn a_link_in_the_files_place_is_not_followed_and_a_pipe_delays_nothing() {
        let dir = system();
        let ssh = dir.path().join("home/me/.ssh");
        std::fs::create_dir(&ssh).unwrap();
        let secret = dir.path().join("secret");
        std::fs::write(&secret, "root:hash\n").unwrap();
        std::os::unix::fs::symlink(&secret, ssh.join(FILE)).unwrap();
        get(dir.path(), "me").unwrap_err();
        add(dir.path(), &keys(&[ONE], false)).unwrap_err();
        add(dir.path(), &keys(&[ONE], true)).unwrap();
        assert_eq!(std::fs::read_to_string(&secret).unwrap(), "root:hash\n");
        std::fs::remove_file(ssh.join(FILE)).unwrap();
        rustix::fs::mkfifoat(rustix::fs::CWD, ssh.join(FILE), 0o600.into()).unwrap();
        get(dir.path(), "me").unwrap_err();
    }

    #[test]
    fn the_users_rights_are_enough_and_no_more() {
        let dir = system();
        let home = dir.path().join("home/me");
        std::fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).unwrap();
        std::fs::write(
            dir.path().join("etc/passwd"),
            "me:x:4242:4243::/home/me:/bin/sh\n",
        )
        .unwrap();
        if !rustix::process::geteuid().is_root() {
            // Who may not take other rights has only its own.
            return add(dir.path(), &keys(&[ONE], false)).map(drop).unwrap();
        }
        // The home is root's: the user may not make a directory there.
        let fault = add(dir.path(), &keys(&[ONE], false)).unwrap_err();
        assert!(fault.desc.contains("Permission denied"), "{fault}");
        std::os::unix::fs::chown(&home, Some(4242), Some(4243)).unwrap();
        add(dir.path(), &keys(&[ONE], false)).unwrap();
        let metadata = std::fs::metadata(home.join(".ssh/authorized_keys")).unwrap();
        assert_eq!((metadata.uid(), metadata.gid()), (4242, 4243));
        // And afterwards this thread has its own again.
        std::fs::write(dir.path().join("etc/still"), "root").unwrap();
    }
}
