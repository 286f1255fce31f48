//! Names of entries: which are refused, and what they mean (OCI image-spec, layer.md).

use std::fmt;

use crate::Limits;

/// What is wrong with a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PathFault {
    /// It has a `..` in it.
    Parent,
    /// It is longer than allowed.
    Long,
    /// A part of it is longer than 255 bytes.
    LongPart,
    /// It has too many parts.
    Deep,
    /// A whiteout that names nothing, or is used as a directory.
    Whiteout,
}

impl fmt::Display for PathFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Parent => "it contains \"..\"",
            Self::Long => "it is too long",
            Self::LongPart => "a part of it is longer than 255 bytes",
            Self::Deep => "it has too many parts",
            Self::Whiteout => "it is a whiteout that names nothing",
        })
    }
}

/// What an entry is for.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Target<'a> {
    /// A file or directory of that name.
    Entry,
    /// The directory's content in lower layers is hidden.
    Opaque(&'a [&'a [u8]]),
    /// The name in the directory is hidden.
    Whiteout(&'a [&'a [u8]], &'a [u8]),
    /// Bookkeeping of AUFS.
    Ignored,
}

/// Splits a name into its parts; none for the root. A leading slash also means the root.
pub(crate) fn components<'a>(path: &'a [u8], limits: &Limits) -> Result<Vec<&'a [u8]>, PathFault> {
    if path.len() > limits.path_bytes {
        return Err(PathFault::Long);
    }
    let mut parts = Vec::new();
    for part in path.split(|byte| *byte == b'/') {
        match part {
            b"" | b"." => {}
            b".." => return Err(PathFault::Parent),
            part if part.len() > 255 => return Err(PathFault::LongPart),
            part => parts.push(part),
        }
    }
    if parts.len() > limits.path_depth {
        Err(PathFault::Deep)
    } else {
        Ok(parts)
    }
}

/// Distinguishes whiteouts from entries.
pub(super) fn target<'a>(path: &'a [&'a [u8]]) -> Result<Target<'a>, PathFault> {
    let Some((name, parents)) = path.split_last() else {
        return Ok(Target::Entry);
    };
    for parent in parents {
        if parent.starts_with(b".wh..wh.") {
            return Ok(Target::Ignored);
        }
        if parent.starts_with(b".wh.") {
            return Err(PathFault::Whiteout);
        }
    }
    match name.strip_prefix(b".wh.") {
        None => Ok(Target::Entry),
        Some(b".wh..opq") => Ok(Target::Opaque(parents)),
        Some(name) if name.starts_with(b".wh.") => Ok(Target::Ignored),
        Some(b"" | b"." | b"..") => Err(PathFault::Whiteout),
        Some(name) => Ok(Target::Whiteout(parents, name)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(path: &[u8]) -> Result<Vec<&[u8]>, PathFault> {
        components(path, &Limits::default())
    }

    #[test]
    fn names_begin_at_the_root_and_stay_inside() {
        assert_eq!(
            split(b"./usr//bin/./sh/"),
            Ok(vec![&b"usr"[..], b"bin", b"sh"])
        );
        assert_eq!(split(b"./"), Ok(vec![]));
        assert_eq!(split(b"/"), Ok(vec![]));
        assert_eq!(split(b"//etc/passwd"), Ok(vec![&b"etc"[..], b"passwd"]));
        assert_eq!(split(b"/../etc/passwd"), Err(PathFault::Parent));
        assert_eq!(split(b"a/../../b"), Err(PathFault::Parent));
        assert_eq!(split(b"..."), Ok(vec![&b"..."[..]]));
        assert_eq!(split(&[b'x'; 256]), Err(PathFault::LongPart));
        assert_eq!(split(&[b'x'; 5000]), Err(PathFault::Long));
        assert_eq!(split(&b"a/".repeat(1025)), Err(PathFault::Deep));
    }

    #[test]
    fn whiteouts_are_told_from_entries() {
        let kinds = |text: &'static str| {
            let path: Vec<&[u8]> = text.split('/').map(str::as_bytes).collect();
            target(&path).map(|target| match target {
                Target::Entry => "entry".to_owned(),
                Target::Ignored => "ignored".to_owned(),
                Target::Opaque(dir) => format!("opaque {}", dir.len()),
                Target::Whiteout(dir, name) => {
                    format!("whiteout {} {}", dir.len(), String::from_utf8_lossy(name))
                }
            })
        };
        assert_eq!(kinds("a/b").unwrap(), "entry");
        assert_eq!(kinds("a/.wh.b").unwrap(), "whiteout 1 b");
        assert_eq!(kinds(".wh..b").unwrap(), "whiteout 0 .b");
        assert_eq!(kinds("a/.wh..wh..opq").unwrap(), "opaque 1");
        assert_eq!(kinds(".wh..wh.plnk/1.2").unwrap(), "ignored");
        assert_eq!(kinds(".wh..wh.aufs").unwrap(), "ignored");
        for bad in [".wh.", ".wh..", ".wh...", ".wh.x/y"] {
            assert_eq!(kinds(bad), Err(PathFault::Whiteout), "{bad}");
        }
    }
}
