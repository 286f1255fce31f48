//! `--mount KEY=VALUE,…`: the long form of `--volume` and `--tmpfs`.

use super::spec_flags::{Tmpfs, parse_tmpfs};
use crate::cli::container::{Volume, volumes};

/// What one `--mount` mounts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum MountArg {
    /// A directory or file of the host.
    Bind(Volume),
    /// A file system in the guest's memory.
    Tmpfs(Tmpfs),
}

const USAGE: &str = "write type=bind,source=HOST,target=GUEST or type=tmpfs,target=GUEST; further \
                     fields are readonly, bind-propagation, tmpfs-size and tmpfs-mode";

/// The fields of a `--mount`, as far as they are set.
#[derive(Debug, Default)]
struct Fields<'a> {
    kind: Option<&'a str>,
    source: Option<&'a str>,
    target: Option<&'a str>,
    read_only: bool,
    propagation: Option<bool>,
    tmpfs: Vec<String>,
}

impl<'a> Fields<'a> {
    fn parse(text: &'a str) -> Result<Self, String> {
        let mut fields = Self::default();
        for field in text.split(',') {
            let (key, value) = match field.split_once('=') {
                Some((key, value)) => (key, Some(value)),
                None => (field, None),
            };
            fields.set(key, value)?;
        }
        Ok(fields)
    }

    fn set(&mut self, key: &str, value: Option<&'a str>) -> Result<(), String> {
        let needed = || value.ok_or_else(|| format!("{key} has no value: {USAGE}"));
        match key {
            "type" => self.kind = Some(needed()?),
            "source" | "src" => self.source = Some(needed()?),
            "target" | "dst" | "destination" => self.target = Some(needed()?),
            "readonly" | "ro" => self.read_only = boolean(key, value)?,
            "bind-propagation" => {
                let word = needed()?;
                let follows = volumes::parse_propagation(word);
                let follows = follows.unwrap_or_else(|| {
                    Err(format!(
                        "`{word}` is none of private, rprivate, slave and rslave"
                    ))
                });
                self.propagation = Some(follows?);
            }
            "tmpfs-size" => self.tmpfs.push(format!("size={}", needed()?)),
            "tmpfs-mode" => self.tmpfs.push(format!("mode={}", needed()?)),
            // How docker's own file sharing caches.
            "consistency" => {}
            "bind-nonrecursive" | "bind-recursive" => {
                return Err(format!(
                    "{key}: mounts below the source are always shared, too"
                ));
            }
            _ => return Err(format!("unknown field `{key}`: {USAGE}")),
        }
        Ok(())
    }
}

fn boolean(key: &str, value: Option<&str>) -> Result<bool, String> {
    match value {
        None | Some("true" | "1") => Ok(true),
        Some("false" | "0") => Ok(false),
        Some(other) => Err(format!("{key}={other}: write true or false")),
    }
}

/// Parses the fields of one `--mount`.
pub(super) fn parse(text: &str) -> Result<MountArg, String> {
    let fields = Fields::parse(text)?;
    let target = fields.target.ok_or(USAGE)?;
    match fields.kind {
        Some("bind") if fields.tmpfs.is_empty() => {
            let source = fields.source.ok_or(USAGE)?;
            let follows = fields.propagation.unwrap_or(false);
            let volume = volumes::new(source, target, fields.read_only, follows);
            volume.map(MountArg::Bind).ok_or_else(|| {
                "the source is absolute or begins with ./ or ../, and the target is an absolute \
                 path of the container's"
                    .to_owned()
            })
        }
        Some("tmpfs") if fields.source.is_none() && fields.propagation.is_none() => {
            let mut options = fields.tmpfs;
            options.extend(fields.read_only.then(|| "ro".to_owned()));
            parse_tmpfs(&format!("{target}:{}", options.join(","))).map(MountArg::Tmpfs)
        }
        Some("bind" | "tmpfs") => Err(format!("fields of several types: {USAGE}")),
        // docker's default.
        None | Some("volume") => Err(
            "there are no named volumes: what an image declares as a volume is part of the \
             container's root, and a directory of the host is mounted by \
             type=bind,source=HOST,target=GUEST"
                .to_owned(),
        ),
        Some(other) => Err(format!("unknown type `{other}`: {USAGE}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mount_is_the_same_as_the_volume_or_tmpfs_of_its_short_form() {
        for (long, short) in [
            ("type=bind,source=/a,target=/b", "/a:/b"),
            ("type=bind,src=/a,dst=/b,readonly", "/a:/b:ro"),
            ("target=/b,ro=true,source=./a,type=bind", "./a:/b:ro"),
            (
                "type=bind,src=/a,dst=/b,ro=false,consistency=cached",
                "/a:/b",
            ),
            (
                "type=bind,src=/a,dst=/b,bind-propagation=rslave",
                "/a:/b:rslave",
            ),
        ] {
            let volume = volumes::parse(short).unwrap();
            assert_eq!(parse(long), Ok(MountArg::Bind(volume)), "{long}");
        }
        for (long, short) in [
            ("type=tmpfs,target=/b", "/b"),
            (
                "type=tmpfs,dst=/b,tmpfs-size=1m,tmpfs-mode=1770",
                "/b:size=1m,mode=1770",
            ),
            ("type=tmpfs,destination=/b,readonly", "/b:ro"),
        ] {
            let tmpfs = parse_tmpfs(short).unwrap();
            assert_eq!(parse(long), Ok(MountArg::Tmpfs(tmpfs)), "{long}");
        }
    }

    #[test]
    fn a_mount_that_cannot_be_is_refused_with_the_reason() {
        for (bad, reason) in [
            ("", "unknown field"),
            ("type=bind,source=/a", "target=GUEST"),
            ("type=bind,target=/b", "source=HOST"),
            ("type=bind,source=a,target=/b", "absolute"),
            ("type=bind,source=/a,target=/", "absolute"),
            ("type=bind,source,target=/b", "source has no value"),
            (
                "type=bind,source=/a,target=/b,tmpfs-size=1m",
                "several types",
            ),
            (
                "type=bind,source=/a,target=/b,bind-propagation=shared",
                "rslave",
            ),
            (
                "type=bind,source=/a,target=/b,bind-propagation=x",
                "none of private",
            ),
            ("type=bind,source=/a,target=/b,readonly=x", "true or false"),
            ("type=tmpfs,source=/a,target=/b", "several types"),
            ("type=tmpfs,target=/b,tmpfs-mode=9", "mode=9"),
            ("type=volume,source=data,target=/b", "no named volumes"),
            ("source=data,target=/b", "no named volumes"),
            ("type=npipe,target=/b", "unknown type"),
            (
                "type=bind,source=/a,target=/b,volume-nocopy",
                "unknown field",
            ),
        ] {
            let error = parse(bad).unwrap_err();
            assert!(error.contains(reason), "{bad}: {error}");
        }
    }
}
