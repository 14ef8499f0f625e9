package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/uuid"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/deliver"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/hub/summaries"
	"github.com/towline/towline/internal/localkube"
	"github.com/towline/towline/internal/source"
)

// configPrefix and libPrefix are the prefixes of the keys of custom resources. inputsAnnotation is the annotation of
// groups with the digest of the inputs.
const (
	configPrefix     = registryPrefix + "config.projectsveltos.io/"
	libPrefix        = registryPrefix + "lib.projectsveltos.io/"
	inputsAnnotation = "towline.dev/inputs"
)

// filler writes copies of a profile and of its objects to etcd, as a hub would have left them: with the digests by
// which the next hub finds them unchanged. No hub runs meanwhile. A hub would need an hour for 100 profiles on 1,000
// clusters.
type filler struct {
	run         *run
	codeVersion string
	template    fillProfile
	// copies are the other profiles. All names have the same length, so that a name can be replaced in encoded objects.
	copies []fillProfile
	// summaryUIDs has the UIDs of the copied summaries, by name.
	summaryUIDs map[string]types.UID
}

// fillProfile is a profile, and its content of the same name.
type fillProfile struct {
	name    string
	uid     types.UID
	content *corev1.ConfigMap
}

func fillName(i int) string { return fmt.Sprintf("fill-%04d", i) }

// fill copies the first of the profiles until there are as many as configured.
func (r *run) fill(ctx context.Context) error {
	binary, err := localkube.Binary("towline")
	if err != nil {
		return err
	}
	f := &filler{run: r, copies: make([]fillProfile, r.fillProfiles-1), summaryUIDs: map[string]types.UID{}}
	if f.codeVersion, err = summaries.CodeVersion(binary); err != nil {
		return err
	}
	profile := &configv1beta1.ClusterProfile{}
	f.template = fillProfile{name: fillName(0), content: &corev1.ConfigMap{}}
	if err := r.hub.client.Get(ctx, client.ObjectKey{Name: f.template.name}, profile); err != nil {
		return err
	}
	f.template.uid = profile.UID
	if err := r.hub.client.Get(ctx, client.ObjectKey{Namespace: "default", Name: f.template.name}, f.template.content); err != nil {
		return err
	}
	for i := range f.copies {
		name := fillName(i + 1)
		content := f.template.content.DeepCopy()
		content.ObjectMeta = metav1.ObjectMeta{Namespace: "default", Name: name}
		for key, text := range content.Data {
			content.Data[key] = strings.ReplaceAll(text, f.template.name, name)
		}
		if err := r.hub.client.Create(ctx, content); err != nil {
			return err
		}
		f.copies[i] = fillProfile{name: name, uid: uuid.NewUUID(), content: content}
	}
	r.hub.entries += len(f.copies) * r.objects
	// A summary needs its profile, and a group its summary.
	for _, step := range []struct {
		prefix string
		write  func(context.Context, stored) error
	}{
		{configPrefix + "clusterprofiles/", f.copyObject},
		{configPrefix + "clustersummaries/", f.copyObject},
		{configPrefix + "clusterconfigurations/", f.extendConfiguration},
		{libPrefix + "configurationgroups/", f.copyGroup},
	} {
		if err := f.forEach(ctx, step.prefix, step.write); err != nil {
			return err
		}
	}
	return nil
}

// forEach calls write for the objects of the template: the new ones are not among them.
func (f *filler) forEach(ctx context.Context, prefix string, write func(context.Context, stored) error) error {
	var objects []stored
	err := f.run.hub.etcd.forEach(ctx, prefix, func(object stored) error {
		if bytes.Contains(object.value, []byte(f.template.name)) {
			objects = append(objects, object)
		}
		return nil
	})
	if err != nil {
		return err
	}
	return inParallel(len(objects), func(i int) error { return write(ctx, objects[i]) })
}

// copyFor returns the object of the template for another profile, with that UID.
func (f *filler) copyFor(profile fillProfile, object stored, before, uid types.UID) stored {
	replacer := strings.NewReplacer(f.template.name, profile.name, string(f.template.uid), string(profile.uid), string(before), string(uid))
	return stored{replacer.Replace(object.key), []byte(replacer.Replace(string(object.value)))}
}

// copyObject writes the copies of a profile or of a summary.
func (f *filler) copyObject(ctx context.Context, object stored) error {
	decoded := &metav1.PartialObjectMetadata{}
	if err := json.Unmarshal(object.value, decoded); err != nil {
		return err
	}
	for _, profile := range f.copies {
		uid := profile.uid
		if decoded.Kind == configv1beta1.ClusterSummaryKind {
			uid = uuid.NewUUID()
			f.run.fleet.mu.Lock()
			f.summaryUIDs[strings.ReplaceAll(decoded.Name, f.template.name, profile.name)] = uid
			f.run.fleet.mu.Unlock()
		}
		if err := f.run.hub.etcd.put(ctx, f.copyFor(profile, object, decoded.UID, uid)); err != nil {
			return err
		}
	}
	return nil
}

// copyGroup writes the copies of a group, after the agent has taken note of them.
func (f *filler) copyGroup(ctx context.Context, object stored) error {
	group := &libv1beta1.ConfigurationGroup{}
	if err := json.Unmarshal(object.value, group); err != nil {
		return err
	}
	id, _ := deliver.IDOf(group)
	summary := &configv1beta1.ClusterSummary{}
	if err := f.run.hub.client.Get(ctx, client.ObjectKey{Namespace: group.Spec.SourceRef.Namespace, Name: id.RequestorName}, summary); err != nil {
		return err
	}
	member := fleet.Member{Name: summary.Spec.ClusterName, DeliveryNamespace: group.Namespace}
	before, err := f.inputsDigest(f.template, summary.UID)
	if err != nil {
		return err
	}
	if before != group.Annotations[inputsAnnotation] {
		return errors.New("the hub computes the digest of the inputs in another way: see summaries.BundleInputs")
	}
	for _, profile := range f.copies {
		copiedID := id
		copiedID.RequestorName = strings.ReplaceAll(id.RequestorName, f.template.name, profile.name)
		f.run.fleet.mu.Lock()
		uid, engine := f.summaryUIDs[copiedID.RequestorName], f.run.fleet.engines[summary.Spec.ClusterName]
		f.run.fleet.mu.Unlock()
		digest, err := f.inputsDigest(profile, uid)
		if err != nil {
			return err
		}
		engine.accept(copiedID, bundle.DigestFromBytes(group.Spec.RequestorHash))
		copied := f.copyFor(profile, object, group.UID, uuid.NewUUID())
		replacer := strings.NewReplacer(before, digest, group.Name, deliver.GroupName(member, copiedID))
		if err := f.run.hub.etcd.put(ctx, stored{replacer.Replace(copied.key), []byte(replacer.Replace(string(copied.value)))}); err != nil {
			return err
		}
	}
	return nil
}

// inputsDigest returns the digest of the inputs of a summary's bundle.
func (f *filler) inputsDigest(profile fillProfile, summary types.UID) (string, error) {
	return summaries.BundleInputs{
		Code: f.codeVersion, Summary: summary, Generation: 1,
		Owner: bundle.Owner{Kind: configv1beta1.ClusterProfileKind, Name: profile.name, Tier: bundle.DefaultTier},
		Objects: []summaries.InputObject{{
			Reference: source.Reference{Kind: "ConfigMap", Namespace: "default", Name: profile.name},
			UID:       profile.content.UID, Version: profile.content.ResourceVersion,
		}},
	}.Digest()
}

// extendConfiguration adds the entries of the copies to a ClusterConfiguration.
func (f *filler) extendConfiguration(ctx context.Context, object stored) error {
	configuration := &configv1beta1.ClusterConfiguration{}
	if err := json.Unmarshal(object.value, configuration); err != nil {
		return err
	}
	entries := &configuration.Status.ClusterProfileResources
	index := slices.IndexFunc(*entries, func(r configv1beta1.ClusterProfileResource) bool { return r.ClusterProfileName == f.template.name })
	if index < 0 {
		return fmt.Errorf("ClusterConfiguration of %s does not list %s", configuration.Namespace, f.template.name)
	}
	template := (*entries)[index]
	for i, profile := range f.copies {
		entry := *template.DeepCopy()
		entry.ClusterProfileName = profile.name
		for j := range entry.Features[0].Resources {
			resource := &entry.Features[0].Resources[j]
			resource.Name = strings.ReplaceAll(resource.Name, f.template.name, profile.name)
		}
		*entries = slices.Insert(*entries, index+1+i, entry)
		configuration.OwnerReferences = append(configuration.OwnerReferences, metav1.OwnerReference{
			APIVersion: configv1beta1.GroupVersion.String(), Kind: configv1beta1.ClusterProfileKind, Name: profile.name, UID: profile.uid,
		})
	}
	raw, err := json.Marshal(configuration)
	if err != nil {
		return err
	}
	return f.run.hub.etcd.put(ctx, stored{object.key, raw})
}

// manySummaries kills the hub, fills etcd, changes the content of one profile and starts the hub.
func manySummaries(ctx context.Context, r *run, result *result) error {
	if err := r.rollOut(ctx, nil, []string{fillName(0)}, fillLabel, r.clusters); err != nil {
		return err
	}
	if err := r.hub.awaitQuiet(ctx); err != nil {
		return err
	}
	r.hub.kill()
	began := time.Now()
	if err := r.fill(ctx); err != nil {
		return err
	}
	result.add("filled after", time.Since(began).Seconds(), "s")
	return r.startWithChange(ctx, result, fillName(0))
}
