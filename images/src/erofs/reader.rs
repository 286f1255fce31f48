//! Reads images back for tests, written from the kernel's documentation and not from the writer's
//! code.

use std::collections::BTreeMap;

/// A file as `stat` and the like would show it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct FileStat {
    pub(crate) mode: u16,
    pub(crate) links: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) mtime: (i64, u32),
    pub(crate) nid: u64,
    /// Content, or the target of a link; a device's number.
    pub(crate) data: Vec<u8>,
    pub(crate) device: u32,
    pub(crate) xattrs: BTreeMap<String, Vec<u8>>,
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(bytes[at..at + 2].try_into().unwrap())
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
}

/// All files by path; the root is the empty one.
pub(crate) fn read(image: &[u8]) -> BTreeMap<Vec<u8>, FileStat> {
    let sb = &image[1024..1152];
    assert_eq!(u32_at(sb, 0), 0xE0F5_E1E2);
    assert_eq!(sb[12], 12, "4 KiB blocks");
    assert_eq!(u32_at(sb, 80), 0, "no incompatible features");
    assert_eq!(u64::from(u32_at(sb, 36)) * 4096, image.len() as u64);
    let volume = Volume {
        image,
        meta: u32_at(sb, 40) as usize * 4096,
        build_time: u64_at(sb, 24) as i64,
    };
    let mut found = BTreeMap::new();
    let root = u64::from(u16_at(sb, 14));
    volume.walk(Vec::new(), root, root, &mut found);
    let nids: std::collections::BTreeSet<_> = found.values().map(|file| file.nid).collect();
    assert_eq!(u64_at(sb, 16), nids.len() as u64, "number of inodes");
    found
}

struct Volume<'a> {
    image: &'a [u8],
    meta: usize,
    build_time: i64,
}

impl Volume<'_> {
    fn inode(&self, nid: u64) -> FileStat {
        let at = self.meta + nid as usize * 32;
        let i = &self.image[at..];
        let format = u16_at(i, 0);
        let extended = format & 1 == 1;
        let layout = format >> 1 & 7;
        let size = if extended {
            u64_at(i, 8)
        } else {
            u64::from(u32_at(i, 8))
        } as usize;
        let inode = if extended { 64 } else { 32 };
        assert!(at % 4096 + inode <= 4096, "an inode within a block");
        let count = usize::from(u16_at(i, 2));
        let xattrs = if count == 0 { 0 } else { 12 + 4 * (count - 1) };
        let mode = u16_at(i, 4);
        let union = u32_at(i, 16);
        let mut data = Vec::new();
        if matches!(mode >> 12, 4 | 8 | 10) {
            let start = union as usize * 4096;
            let whole = if layout == 2 {
                size / 4096 * 4096
            } else {
                size
            };
            data.extend_from_slice(&self.image[start..start + whole]);
            let tail = at + inode + xattrs;
            let rest = size - whole;
            assert!(
                rest == 0 || tail % 4096 + rest <= 4096,
                "a tail within a block"
            );
            data.extend_from_slice(&self.image[tail..tail + rest]);
        }
        FileStat {
            mode,
            nid,
            links: if extended {
                u32_at(i, 44)
            } else {
                u16_at(i, 6).into()
            },
            uid: if extended {
                u32_at(i, 24)
            } else {
                u16_at(i, 24).into()
            },
            gid: if extended {
                u32_at(i, 28)
            } else {
                u16_at(i, 26).into()
            },
            mtime: if extended {
                (u64_at(i, 32) as i64, u32_at(i, 40))
            } else {
                (self.build_time, 0)
            },
            device: if matches!(mode >> 12, 2 | 6) {
                union
            } else {
                0
            },
            data,
            xattrs: xattrs_in(&i[inode..inode + xattrs]),
        }
    }

    fn walk(&self, path: Vec<u8>, nid: u64, parent: u64, found: &mut BTreeMap<Vec<u8>, FileStat>) {
        let file = self.inode(nid);
        if file.mode >> 12 == 4 {
            let mut names: Vec<Vec<u8>> = Vec::new();
            for block in file.data.chunks(4096) {
                let count = usize::from(u16_at(block, 8)) / 12;
                for index in 0..count {
                    let entry = &block[index * 12..];
                    let start = usize::from(u16_at(entry, 8));
                    let end = if index + 1 < count {
                        u16_at(entry, 20).into()
                    } else {
                        block.len()
                    };
                    let name = &block[start..end];
                    let name = name.split(|byte| *byte == 0).next().unwrap();
                    let child = u64_at(entry, 0);
                    match name {
                        b"." => assert_eq!(child, nid),
                        b".." => assert_eq!(child, parent),
                        _ => {
                            let full = if path.is_empty() {
                                name.to_vec()
                            } else {
                                [&path, &b"/"[..], name].concat()
                            };
                            let kind = [0, 5, 3, 0, 2, 0, 4, 0, 1, 0, 7]
                                [usize::from(self.inode(child).mode >> 12)];
                            assert_eq!(
                                entry[10],
                                kind,
                                "file type of {}",
                                String::from_utf8_lossy(name)
                            );
                            self.walk(full, child, nid, found);
                        }
                    }
                    names.push(name.to_vec());
                }
            }
            assert!(names.is_sorted() && names.windows(2).all(|pair| pair[0] != pair[1]));
        }
        found.insert(path, file);
    }
}

fn xattrs_in(mut bytes: &[u8]) -> BTreeMap<String, Vec<u8>> {
    let mut found = BTreeMap::new();
    if bytes.is_empty() {
        return found;
    }
    assert_eq!(bytes[..12], [0; 12], "no filter, no shared attributes");
    bytes = &bytes[12..];
    while !bytes.is_empty() {
        let prefix = match bytes[1] {
            1 => "user.",
            2 => "system.posix_acl_access",
            3 => "system.posix_acl_default",
            4 => "trusted.",
            6 => "security.",
            other => panic!("prefix {other}"),
        };
        let (name, value) = (usize::from(bytes[0]), usize::from(u16_at(bytes, 2)));
        let text = String::from_utf8_lossy(&bytes[4..4 + name]).into_owned();
        found.insert(
            format!("{prefix}{text}"),
            bytes[4 + name..4 + name + value].to_vec(),
        );
        bytes = &bytes[(4 + name + value).next_multiple_of(4)..];
    }
    found
}
