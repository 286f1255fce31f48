//! A reader of FAT12 and FAT16, written apart from the writer, to compare with it.

/// The label of a volume, and the paths and contents of its files.
pub type Contents = (String, Vec<(String, Vec<u8>)>);

/// Returns the label and all files of a volume, or why it is not one.
///
/// # Errors
///
/// The bytes are not a volume that a guest would read without complaint.
pub fn read(image: &[u8]) -> Result<Contents, &'static str> {
    let volume = Volume::open(image)?;
    let mut files = Vec::new();
    let root = image
        .get(volume.root..volume.data)
        .ok_or("the root is cut off")?;
    let label = root.get(..11).ok_or("no label")?;
    volume.directory(root, "", 0, &mut files)?;
    let label = String::from_utf8_lossy(label).trim_end().to_owned();
    Ok((label, files))
}

struct Volume<'a> {
    image: &'a [u8],
    table: usize,
    root: usize,
    data: usize,
    cluster: usize,
    clusters: usize,
}

impl<'a> Volume<'a> {
    fn open(image: &'a [u8]) -> Result<Self, &'static str> {
        let word = |place: usize| -> Result<usize, &'static str> {
            let bytes = image.get(place..place + 2).ok_or("no boot sector")?;
            Ok(usize::from(u16::from_le_bytes([bytes[0], bytes[1]])))
        };
        if word(510)? != 0xaa55 || word(11)? != 512 || word(14)? != 1 {
            return Err("no boot sector");
        }
        if image[446..510].iter().any(|byte| *byte != 0) {
            return Err("partitions");
        }
        let cluster = usize::from(image[13]);
        if !cluster.is_power_of_two() || image[16] != 2 {
            return Err("no clusters");
        }
        let sectors = match word(19)? {
            0 => word(32)? + (word(34)? << 16),
            sectors => sectors,
        };
        if sectors * 512 != image.len() {
            return Err("another size");
        }
        let table = 512;
        let table_bytes = word(22)? * 512;
        let root = table + 2 * table_bytes;
        let data = root + (word(17)? * 32).next_multiple_of(512);
        let clusters = (image.len().checked_sub(data).ok_or("no data")?) / (cluster * 512);
        if image.get(table..table + table_bytes) != image.get(table + table_bytes..root) {
            return Err("the tables differ");
        }
        let cluster = cluster * 512;
        Ok(Self {
            image,
            table,
            root,
            data,
            cluster,
            clusters,
        })
    }

    fn next(&self, cluster: usize) -> Result<Option<usize>, &'static str> {
        let byte = |place: usize| -> Result<usize, &'static str> {
            let byte = self
                .image
                .get(self.table + place)
                .ok_or("outside the table")?;
            Ok(usize::from(*byte))
        };
        let (next, end) = if self.clusters <= 4084 {
            let place = cluster * 3 / 2;
            let word = byte(place)? | byte(place + 1)? << 8;
            let next = if cluster.is_multiple_of(2) {
                word & 0xfff
            } else {
                word >> 4
            };
            (next, 0xff8)
        } else {
            (byte(cluster * 2)? | byte(cluster * 2 + 1)? << 8, 0xfff8)
        };
        match next {
            _ if next >= end => Ok(None),
            _ if (2..self.clusters + 2).contains(&next) => Ok(Some(next)),
            _ => Err("a chain leads nowhere"),
        }
    }

    fn chain(&self, first: usize) -> Result<Vec<u8>, &'static str> {
        let mut bytes = Vec::new();
        let mut next = (first != 0).then_some(first);
        while let Some(cluster) = next {
            if bytes.len() > self.image.len() {
                return Err("a chain without an end");
            }
            let start = self.data + (cluster - 2) * self.cluster;
            let content = self.image.get(start..start + self.cluster);
            bytes.extend_from_slice(content.ok_or("a cluster outside")?);
            next = self.next(cluster)?;
        }
        Ok(bytes)
    }

    fn directory(
        &self,
        entries: &[u8],
        path: &str,
        depth: usize,
        files: &mut Vec<(String, Vec<u8>)>,
    ) -> Result<(), &'static str> {
        if depth > 64 {
            return Err("too deep");
        }
        let mut long: Vec<u16> = Vec::new();
        for entry in entries.chunks_exact(32) {
            match (entry[0], entry[11]) {
                (0, _) => break,
                (_, 0x0f) => {
                    let places = (1..11).chain(14..26).chain(28..32);
                    let bytes: Vec<u8> = places.map(|place| entry[place]).collect();
                    let units = bytes.chunks_exact(2);
                    let units = units.map(|unit| u16::from_le_bytes([unit[0], unit[1]]));
                    let mut part: Vec<u16> = units.take_while(|unit| *unit != 0).collect();
                    part.append(&mut long);
                    long = part;
                }
                (b'.', _) => {}
                (_, attributes) if attributes & 0x08 != 0 => {}
                (_, attributes) => {
                    let name = String::from_utf16_lossy(&std::mem::take(&mut long));
                    let path = match path {
                        "" => name,
                        path => format!("{path}/{name}"),
                    };
                    let first = usize::from(u16::from_le_bytes([entry[26], entry[27]]));
                    let bytes = self.chain(first)?;
                    let size = [entry[28], entry[29], entry[30], entry[31]];
                    let size = u32::from_le_bytes(size) as usize;
                    if attributes & 0x10 != 0 {
                        self.directory(&bytes, &path, depth + 1, files)?;
                    } else {
                        let content = bytes.get(..size).ok_or("a file is cut off")?;
                        files.push((path, content.to_vec()));
                    }
                }
            }
        }
        Ok(())
    }
}
