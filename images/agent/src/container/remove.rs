//! The end of containers, with all that they held.

use super::rootfs::Rootfs;
use super::{ContainerError, Containers, Result, Slot, lock, remove_folder, run_to_end};

impl Containers {
    /// Kills what is left of a container and frees what it held. One that does not exist is
    /// as good as deleted. Gives the serials of the images that nothing uses any more.
    ///
    /// # Errors
    ///
    /// [`ContainerError`] when processes do not end; the container stays then.
    pub async fn delete(&self, id: &str) -> Result<Vec<String>> {
        let container = {
            let mut table = self.lock();
            let Some(slot) = table.slots.get_mut(id) else {
                return Ok(Vec::new());
            };
            let Slot::Ready(container) = std::mem::replace(slot, Slot::Busy) else {
                return Err(ContainerError::WrongState {
                    id: id.to_owned(),
                    state: "busy",
                });
            };
            container
        };
        let (this, id) = (self.clone(), id.to_owned());
        run_to_end(async move {
            if let Err(source) = container.cgroup.destroy().await {
                this.lock().slots.insert(id, Slot::Ready(container));
                return Err(ContainerError::Io {
                    action: "end the container's processes",
                    source,
                });
            }
            // Taken out of the container, which others may hold for another moment.
            drop(std::mem::take(&mut *lock(&container.bound)));
            let rootfs = lock(&container.rootfs).take();
            let mut images = std::mem::take(&mut *lock(&container.volumes));
            images.extend(rootfs.map(Rootfs::unmount));
            let mut released = Vec::new();
            for image in images {
                released.extend(this.shared.images.release(image).await);
            }
            remove_folder(&this.state_of(&container));
            this.lock().slots.remove(&id);
            Ok(released)
        })
        .await
    }

    /// Deletes every container.
    pub async fn delete_all(&self) {
        let ids: Vec<String> = self.lock().slots.keys().cloned().collect();
        for id in ids {
            if let Err(error) = self.delete(&id).await {
                tracing::warn!(%id, %error, "cannot delete a container");
            }
        }
    }
}
