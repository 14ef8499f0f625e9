package engine

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"helm.sh/helm/v4/pkg/release/common"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/inventory"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/release"
)

// The label and the annotations that Helm sets on the objects of a release.
const (
	labelManagedBy             = "app.kubernetes.io/managed-by"
	managedByHelm              = "Helm"
	annotationReleaseName      = "meta.helm.sh/release-name"
	annotationReleaseNamespace = "meta.helm.sh/release-namespace"
)

// releaseRecords returns the store of the cluster's release records. It writes records with the ownership labels and
// annotations of the bundle.
func (o *releaseOp) releaseRecords() release.Store {
	annotations := map[string]string{kube.AnnotationRequestor: o.id.String(), annotationRevisionDigest: o.state.Digest}
	if s := o.state; s.Inputs != "" {
		release.AnnotateRendering(annotations, release.Rendering{Inputs: s.Inputs, Revision: s.RenderedRevision, IsUpgrade: s.IsUpgrade})
	}
	o.engine.ownerScope.Annotate(annotations)
	return release.Store{
		Secrets: o.engine.member.core, Metadata: o.engine.member.metadataClient, Clock: o.engine.clock,
		Labels: map[string]string{kube.LabelReason: o.id.Feature}, Annotations: annotations, Memory: o.engine.recordMemory,
	}
}

// readReleaseRecord is release.Store.Get for the release of the operation.
func (o *releaseOp) readReleaseRecord(ctx context.Context, revision int) (record *release.StoredRecord, ok bool, err error) {
	record, ok, err = o.releaseRecords().Get(ctx, o.state.Key(), revision)
	return record, ok, o.asMemoryFailure(err, revision)
}

// asMemoryFailure converts the error of a record that needs too much memory to a releaseError.
func (o *releaseOp) asMemoryFailure(err error, revision int) error {
	if !errors.Is(err, kube.ErrTooMuchMemory) {
		return err
	}
	return &releaseError{text: fmt.Sprintf("%s; give the hub more memory, or delete the record, Secret %s, on the cluster",
		err, release.SecretName(o.state.Name, revision))}
}

// putReleaseRecord is releaseOp.putReleaseRecord for the item.
func (d *releaseDeployment) putReleaseRecord(ctx context.Context, status common.Status, description string) error {
	return d.op.putReleaseRecord(ctx, d.item, status, description)
}

// encodeReleaseRecord encodes the manifest of an item for the release record, unless it is encoded already.
func (o *releaseOp) encodeReleaseRecord(item bundle.Item) (err error) {
	if o.releaseRecord == nil {
		o.releaseRecord, err = release.NewRecord(item, o.state.Revision)
	}
	return err
}

// putReleaseRecord writes the record of the operation's revision, with the results of its hooks, and stores its UID and
// state.
func (o *releaseOp) putReleaseRecord(ctx context.Context, item bundle.Item, status common.Status, description string) error {
	s := o.state
	if err := o.encodeReleaseRecord(item); err != nil {
		return err
	}
	record := o.releaseRecord
	record.Version = s.Revision
	release.SetInfo(record, status, description, s.FirstDeployed, o.engine.now())
	for _, h := range record.Hooks {
		for _, run := range s.Hooks {
			if run.Ref.Name == h.Name && run.Ref.Kind == h.Kind && slices.Contains(h.Events, run.Event) {
				h.LastRun.StartedAt, h.LastRun.CompletedAt, h.LastRun.Phase = run.Started, run.Completed, run.Phase
			}
		}
	}
	written, err := o.releaseRecords().Put(ctx, record)
	if errors.Is(err, release.ErrTooLarge) {
		return &releaseError{text: err.Error()}
	}
	if err != nil {
		return asReleaseError(err)
	}
	existing := liveOf(&metav1.PartialObjectMetadata{ObjectMeta: written})
	s.HelmSecretUID, s.HelmSecretFingerprint = existing.UID, existing.Fingerprint()
	return nil
}

// verifyReleaseRecords corrects drift of release records: it writes a deleted or changed record again, with a new
// revision if another client has added revisions. It runs no hooks, since the objects are applied already.
func (p *applyRun) verifyReleaseRecords(ctx context.Context) error {
	for i := range p.next.Releases {
		s := &p.next.Releases[i]
		if s.Stage != inventory.StageDeployed || p.only != nil && !p.only[s.SecretRef()] {
			continue
		}
		at := slices.IndexFunc(p.bundle.Items, func(item bundle.Item) bool { return item.Release != nil && releaseKey(item) == s.Key() })
		if at < 0 {
			continue
		}
		if err := p.verifyReleaseRecord(ctx, s, p.bundle.Items[at]); err != nil {
			return fmt.Errorf("helm release %s: %w", s.Key(), err)
		}
	}
	return nil
}

func (p *applyRun) verifyReleaseRecord(ctx context.Context, s *inventory.ReleaseState, item bundle.Item) error {
	location := releaseRecordLocation(s)
	found, err := p.engine.member.readMetadata(ctx, []objectLocation{location})
	if err != nil {
		return err
	}
	if existing := found[location.key]; existing != nil && existing.UID == s.HelmSecretUID && existing.Fingerprint() == s.HelmSecretFingerprint {
		return nil
	}
	ctx = withReadingAccount(ctx, p.bundle.Options.ServiceAccount)
	op := p.newReleaseOp(s, nil)
	entries, err := op.releaseRecords().List(ctx, s.Key())
	if err != nil {
		return err
	}
	if len(entries) > 0 {
		last := entries[len(entries)-1]
		if op.isFromOtherBundle(last) {
			return nil
		}
		if op.setHelmClientWait(last) {
			p.waiting = op.waiting
			p.waiting.message = fmt.Sprintf("Helm release %s: %s", s.Key(), p.waiting.message)
			return nil
		}
		if last.Revision > s.Revision {
			s.Revision = last.Revision + 1
		}
	}
	if err := op.putReleaseRecord(ctx, item, common.StatusDeployed, "Drift corrected by Towline"); err != nil {
		return err
	}
	ref := s.SecretRef()
	p.changes = append(p.changes, bundle.Change{Ref: ref, Action: bundle.Configured, Reason: "the release record was changed or deleted"})
	if entries, err = op.releaseRecords().List(ctx, s.Key()); err != nil {
		return err
	}
	if err := op.releaseRecords().Supersede(ctx, entries, s.Revision); err != nil {
		return err
	}
	return op.releaseRecords().Prune(ctx, s.Key(), entries, s.Options.MaxHistory, s.Revision)
}

// rebuildReleases rebuilds the release states of a bundle from the release records, if the inventory is lost.
func (e *Engine) rebuildReleases(ctx context.Context, id bundle.ID) ([]inventory.ReleaseState, error) {
	selector := fmt.Sprintf("owner=helm,%s=%s", kube.LabelReason, id.Feature)
	objects := e.member.metadataClient.Resource(corev1.SchemeGroupVersion.WithResource("secrets"))
	limit := kube.NewObjectLimit(maxRebuilt, "release records")
	found := &inventory.Record{}
	err := kube.EachMetadata(ctx, objects, selector, limit, func(secret *metav1.PartialObjectMetadata) error {
		if err := limit.Add(0); err != nil {
			return err
		}
		existing := liveOf(secret)
		entry, ok := release.ParseEntry(secret.ObjectMeta)
		if !ok || existing.OwnerKey() != e.ownerScope.OwnerKey(id) {
			return nil
		}
		s := found.FindRelease(entry.Key)
		if s == nil {
			if len(found.Releases) == maxRebuiltReleases {
				return fmt.Errorf("the records are of more than %d releases", maxRebuiltReleases)
			}
			found.Releases = append(found.Releases, inventory.ReleaseState{Namespace: entry.Namespace, Name: entry.Name})
			s = found.FindRelease(entry.Key)
		}
		if entry.Revision < s.Revision {
			return nil
		}
		s.Revision, s.Digest, s.Stage, s.Operation = entry.Revision, "", inventory.StageBegin, inventory.Upgrading
		s.HelmSecretUID, s.HelmSecretFingerprint = existing.UID, existing.Fingerprint()
		if entry.Status == common.StatusDeployed {
			s.Digest, s.Stage, s.ObjectsApplied = existing.Annotations[annotationRevisionDigest], inventory.StageDeployed, true
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("list release records: %w", err)
	}
	return found.Releases, nil
}

// isFromOtherBundle returns whether another bundle wrote a record, and so owns the release now.
func (o *releaseOp) isFromOtherBundle(entry release.Entry) bool {
	return !isFromHelm(entry) && !o.isFromBundle(entry.Secret)
}

// isFromBundle returns whether this bundle wrote the record in a Secret.
func (o *releaseOp) isFromBundle(secret metav1.ObjectMeta) bool {
	return liveOf(&metav1.PartialObjectMetadata{ObjectMeta: secret}).OwnerKey() == o.engine.ownerScope.OwnerKey(o.id)
}

// isFromHelm returns whether another client of Helm wrote a record.
func isFromHelm(entry release.Entry) bool {
	return liveOf(&metav1.PartialObjectMetadata{ObjectMeta: entry.Secret}).OwnerKey() == ""
}

// setHelmClientWait sets a wait and returns true if another client of Helm is working on the release, since that client
// fails if the records change. The wait is limited, because a killed client leaves a pending record.
func (o *releaseOp) setHelmClientWait(last release.Entry) bool {
	isOver := func(entry release.Entry) bool {
		age := o.engine.now().Sub(entry.Modified()) // negative if the clock of the other client is ahead
		return !entry.Status.IsPending() && entry.Status != common.StatusUninstalling || age > bundle.DefaultTimeout || age < -bundle.DefaultTimeout
	}
	if isOver(last) || !isFromHelm(last) {
		return false
	}
	key, records := o.state.Key(), o.releaseRecords()
	o.setWait(fmt.Sprintf("waiting for another client of Helm: revision %d is %s", last.Revision, last.Status),
		func(ctx context.Context) bool {
			entries, err := records.List(ctx, key)
			return err != nil || len(entries) == 0 || isOver(entries[len(entries)-1])
		})
	return true
}

// adoptFormer adds the objects of a former revision that the helm command deployed to the inventory, except those that
// the new revision has. So they are deleted after the upgrade, as in Helm.
func (d *releaseDeployment) adoptFormer(ctx context.Context) error {
	s := d.op.state
	record, ok, err := d.op.releaseRecords().Get(ctx, s.Key(), s.PreviousRevision)
	if err != nil || !ok {
		return err
	}
	defer record.Close()
	s.FirstDeployed = firstNonZero(record.Info.FirstDeployed, s.FirstDeployed)
	objects, err := record.Objects(ctx)
	if err != nil {
		return err
	}
	entries, err := d.entriesOfFormer(objects)
	if err != nil || len(entries) == 0 {
		return err
	}
	_, found, err := d.engine.readEntries(ctx, entries)
	if err != nil {
		return err
	}
	d.prior = d.prior.Edit()
	for _, entry := range entries {
		if existing := found[entry.Ref.Key()]; existing != nil && existing.belongsToRelease(s.Key().String()) {
			entry.UID = existing.UID
			d.next.Entries[entry.Ref.Key()], d.prior.Entries[entry.Ref.Key()] = entry, entry
		}
	}
	return nil
}

// entriesOfFormer returns inventory entries for those objects of a former revision that the new revision does not have.
func (d *releaseDeployment) entriesOfFormer(objects []*unstructured.Unstructured) ([]inventory.Entry, error) {
	key := d.op.state.Key()
	var entries []inventory.Entry
	for _, obj := range objects {
		ref := kube.RefOf(obj)
		resource, err := d.engine.member.mapper.ResourceInAnyVersion(ref.GVK())
		if meta.IsNoMatchError(err) {
			continue // a kind that the cluster does not serve has no objects
		}
		if err != nil {
			return nil, fmt.Errorf("find the resource of %s of the former revision: %w", ref, err)
		}
		switch {
		case !resource.Namespaced:
			ref.Namespace = ""
		case ref.Namespace == "":
			ref.Namespace = key.Namespace
		}
		if _, known := d.next.Entries[ref.Key()]; !known && !d.desired[ref.Key()] {
			entries = append(entries, inventory.Entry{Ref: ref, Origin: originOfRelease(key.String()), FromHelm: true})
		}
	}
	return entries, nil
}

func firstNonZero(times ...time.Time) time.Time {
	for _, t := range times {
		if !t.IsZero() {
			return t
		}
	}
	return time.Time{}
}

// belongsToRelease returns whether Helm's annotations assign the object to a release. key is namespace/name.
func (l *live) belongsToRelease(key string) bool {
	return key != "" && l.Annotations[annotationReleaseNamespace]+"/"+l.Annotations[annotationReleaseName] == key
}

// releaseOrigin returns the origin of an object of a Helm release, or "" for any other object.
func (l *live) releaseOrigin() string {
	if name := l.Annotations[annotationReleaseName]; name != "" {
		return originOfRelease(l.Annotations[annotationReleaseNamespace] + "/" + name)
	}
	return ""
}

// releaseRecordLocation returns the location of the release record of s.
func releaseRecordLocation(s *inventory.ReleaseState) objectLocation {
	return objectLocation{key: s.SecretRef(), resource: kube.Resource{GVR: corev1.SchemeGroupVersion.WithResource("secrets"), Namespaced: true}}
}
