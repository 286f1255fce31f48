//! The SSH keys that a guest knows its user by: those that the user names, and podvisor's own, which
//! is made the first time.

use std::fs::{self, DirBuilder, File};
use std::io::Read as _;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, bail, ensure};

/// The directory of the key, within the root.
const DIRECTORY: &str = "ssh";

/// The private key in it.
const KEY: &str = "id_ed25519";

/// Longest file with public keys, in bytes.
const MAX_FILE: u64 = 64 << 10;

/// What begins a public key: the kinds of sshd(8).
const KINDS: [&str; 3] = ["ssh-", "ecdsa-", "sk-"];

/// Returns the path of podvisor's own private key.
pub(super) fn own_path(root: &Path) -> PathBuf {
    root.join(DIRECTORY).join(KEY)
}

/// Returns podvisor's own public key, which is made if there is none; `None` where it cannot be
/// made.
pub(super) fn own(root: &Path) -> anyhow::Result<String> {
    let key = own_path(root);
    let public = key.with_extension("pub");
    if !public.exists() {
        make(&key)?;
    }
    read(&public)?
        .pop()
        .with_context(|| format!("{} has no key; remove it", public.display()))
}

fn make(key: &Path) -> anyhow::Result<()> {
    if let Some(dir) = key.parent() {
        let made = DirBuilder::new().recursive(true).mode(0o700).create(dir);
        made.with_context(|| format!("cannot create the directory {}", dir.display()))?;
    }
    // Two that begin at the same time make one each; the second rename wins with both of its files.
    let new = key.with_extension(format!("new{}", std::process::id()));
    let made = Command::new("ssh-keygen")
        .args(["-q", "-t", "ed25519", "-N", "", "-C", "podvisor", "-f"])
        .arg(&new)
        .stdin(Stdio::null())
        .output();
    match made {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => bail!(
            "podvisor makes an SSH key of its own by `ssh-keygen`, which is not installed; install \
             openssh-client, or name a public key by --ssh-key"
        ),
        made => {
            let made = made.context("cannot run ssh-keygen")?;
            ensure!(
                made.status.success(),
                "ssh-keygen did not make {}: {}",
                key.display(),
                String::from_utf8_lossy(&made.stderr).trim()
            );
        }
    }
    let rename = |from: PathBuf, to: PathBuf| {
        fs::rename(&from, &to).with_context(|| format!("cannot create {}", to.display()))
    };
    let mut new_public = new.clone().into_os_string();
    new_public.push(".pub");
    rename(new, key.to_owned())?;
    rename(new_public.into(), key.with_extension("pub"))
}

/// Reads the public keys of a file, one a line.
pub(super) fn read(file: &Path) -> anyhow::Result<Vec<String>> {
    let text = || -> std::io::Result<String> {
        let mut text = String::new();
        File::open(file)?.take(MAX_FILE).read_to_string(&mut text)?;
        Ok(text)
    };
    let text = text().with_context(|| format!("cannot read the SSH key {}", file.display()))?;
    ensure!(
        !text.contains("PRIVATE KEY"),
        "{} is a private key, which no guest must have; name the file with its public key, which \
         ends in .pub",
        file.display()
    );
    let lines = text.lines().map(str::trim);
    let lines = lines.filter(|line| !line.is_empty() && !line.starts_with('#'));
    let keys: Vec<String> = lines.map(str::to_owned).collect();
    ensure!(
        !keys.is_empty() && keys.iter().all(|key| is_public_key(key)),
        "{} is not a file of public SSH keys, such as ~/.ssh/id_ed25519.pub",
        file.display()
    );
    Ok(keys)
}

fn is_public_key(line: &str) -> bool {
    line.split_whitespace().count() >= 2
        && KINDS.iter().any(|kind| line.starts_with(kind))
        && !line.contains(char::is_control)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn public_keys_are_read_and_private_ones_refused() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("key");
        let read = |text: &str| {
            fs::write(&file, text).unwrap();
            read(&file)
        };
        let key = "ssh-ed25519 AAAA me@here";
        assert_eq!(read(&format!("# mine\n{key}\n\n")).unwrap(), [key]);
        let said = read("-----BEGIN OPENSSH PRIVATE KEY-----\n").unwrap_err();
        assert!(said.to_string().contains(".pub"), "{said}");
        for bad in ["", "hello world", "ssh-ed25519", "ssh-rsa A\u{1b}[2J x"] {
            assert!(read(bad).is_err(), "{bad:?}");
        }
        let said = format!("{:#}", super::read(&dir.path().join("none")).unwrap_err());
        assert!(said.contains("none"), "{said}");
    }

    #[test]
    fn podvisors_own_key_is_made_once() {
        let root = tempfile::tempdir().unwrap();
        match own(root.path()) {
            Ok(key) => {
                assert!(is_public_key(&key));
                assert_eq!(own(root.path()).unwrap(), key);
                let mode = {
                    use std::os::unix::fs::PermissionsExt as _;
                    let meta = fs::metadata(own_path(root.path())).unwrap();
                    meta.permissions().mode() & 0o777
                };
                assert_eq!(mode, 0o600);
            }
            // Without OpenSSH, the error says what to do.
            Err(error) => assert!(error.to_string().contains("--ssh-key"), "{error}"),
        }
    }
}
