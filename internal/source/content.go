package source

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/phase"
)

// ErrNotFound is in every error about something that a profile points at and that is not there. The error names it.
var ErrNotFound = errors.New("does not exist")

// The kinds that hold content on the hub.
const (
	kindConfigMap = string(libv1beta1.SourceConfigMap)
	kindSecret    = string(libv1beta1.SourceSecret)
)

// Reference names one ConfigMap or Secret on the hub.
type Reference struct {
	Kind      string
	Namespace string
	Name      string
}

// String prints r for people: "ConfigMap eu/web".
func (r Reference) String() string { return r.Kind + " " + r.Namespace + "/" + r.Name }

// File is one key of a ConfigMap or Secret.
type File struct {
	Name string
	Data []byte
}

// Content is what one ConfigMap or Secret holds. It is a value: nobody changes it.
type Content struct {
	Reference Reference
	// Files are in the order of their names; there are none if an optional reference points at nothing.
	Files []File
	// Digest is "sha256:" and the hex digest of the files' names and bytes.
	Digest string
	// Sensitive says that the content came from a Secret.
	Sensitive bool
	// Template says that the files are Go templates over the Subject.
	Template bool
}

// ManifestsReference returns what ref points at for the subject: names may be templates, and the namespace defaults to the cluster's.
// Errors are phase.Invalid, also about a namespace that the subject is not confined to.
func ManifestsReference(ref libv1beta1.PolicyRef, subject Subject) (Reference, error) {
	return resolve(Reference{Kind: string(ref.Kind), Namespace: ref.Namespace, Name: ref.Name}, subject)
}

// ValuesReference is ManifestsReference for values.
func ValuesReference(ref configv1beta1.ValueFrom, subject Subject) (Reference, error) {
	return resolve(Reference{Kind: string(ref.Kind), Namespace: ref.Namespace, Name: ref.Name}, subject)
}

// LoginReference is ManifestsReference for the Secrets of a login.
func LoginReference(ref corev1.SecretReference, subject Subject) (Reference, error) {
	return resolve(Reference{Kind: kindSecret, Namespace: ref.Namespace, Name: ref.Name}, subject)
}

// Manifests reads the Kubernetes objects that ref points at. It fails with ErrNotFound if they are missing and not optional, and with
// phase.Invalid for a Secret of the wrong type or content that Towline does not understand.
func Manifests(ctx context.Context, hub client.Reader, ref libv1beta1.PolicyRef, subject Subject) (Content, error) {
	reference, err := ManifestsReference(ref, subject)
	if err != nil {
		return Content{}, err
	}
	return read(ctx, hub, reference, presence(ref.Optional))
}

// Values reads the values that ref points at. It fails like Manifests.
func Values(ctx context.Context, hub client.Reader, ref configv1beta1.ValueFrom, subject Subject) (Content, error) {
	reference, err := ValuesReference(ref, subject)
	if err != nil {
		return Content{}, err
	}
	return read(ctx, hub, reference, presence(ref.Optional))
}

// need says whether something has to be there.
type need string

const (
	required need = "required"
	optional need = "optional"
)

func presence(isOptional bool) need {
	if isOptional {
		return optional
	}
	return required
}

func resolve(ref Reference, subject Subject) (Reference, error) {
	var err error
	if ref.Name, err = subject.Expand("name of a "+ref.Kind, ref.Name); err != nil {
		return Reference{}, err
	}
	if ref.Namespace, err = subject.Expand("namespace of "+ref.Kind+" "+ref.Name, ref.Namespace); err != nil {
		return Reference{}, err
	}
	ref.Namespace = cmp.Or(ref.Namespace, subject.Namespace)
	if ref.Name == "" {
		return Reference{}, phase.Invalidf("a reference to a %s has no name", ref.Kind)
	}
	if subject.Confined != "" && ref.Namespace != subject.Confined {
		return Reference{}, phase.Invalidf("%s: a Profile reads its own namespace %s only", ref, subject.Confined)
	}
	return ref, nil
}

func read(ctx context.Context, hub client.Reader, ref Reference, needed need) (Content, error) {
	meta, data, err := readData(ctx, hub, ref)
	if apierrors.IsNotFound(err) {
		if needed == optional {
			return newContent(ref, nil), nil
		}
		return Content{}, fmt.Errorf("%s %w", ref, ErrNotFound)
	}
	if err != nil {
		return Content{}, fmt.Errorf("read %s: %w", ref, err)
	}
	for _, unsupported := range []string{libv1beta1.LuaAnnotation, libv1beta1.SubresourcesAnnotation} {
		if _, marked := meta.Annotations[unsupported]; marked {
			return Content{}, phase.Invalidf("%s: annotation %s is not supported yet", ref, unsupported)
		}
	}
	content := newContent(ref, data)
	_, content.Template = meta.Annotations[libv1beta1.TemplateAnnotation]
	return content, nil
}

func readData(ctx context.Context, hub client.Reader, ref Reference) (metav1.ObjectMeta, map[string][]byte, error) {
	key := client.ObjectKey{Namespace: ref.Namespace, Name: ref.Name}
	switch ref.Kind {
	case kindConfigMap:
		var found corev1.ConfigMap
		if err := hub.Get(ctx, key, &found); err != nil {
			return metav1.ObjectMeta{}, nil, err
		}
		data := maps.Clone(found.BinaryData)
		if data == nil {
			data = map[string][]byte{}
		}
		for name, text := range found.Data {
			data[name] = []byte(text)
		}
		return found.ObjectMeta, data, nil
	case kindSecret:
		var found corev1.Secret
		if err := hub.Get(ctx, key, &found); err != nil {
			return metav1.ObjectMeta{}, nil, err
		}
		if found.Type != libv1beta1.ProfileSecretType {
			return metav1.ObjectMeta{}, nil, phase.Invalidf("its type is %q, but only Secrets of type %q can be deployed", found.Type, libv1beta1.ProfileSecretType)
		}
		return found.ObjectMeta, found.Data, nil
	}
	return metav1.ObjectMeta{}, nil, phase.Invalidf("kind %q is not supported yet", ref.Kind)
}

func newContent(ref Reference, data map[string][]byte) Content {
	content := Content{Reference: ref, Sensitive: ref.Kind == kindSecret}
	sum := sha256.New()
	for _, name := range slices.Sorted(maps.Keys(data)) {
		content.Files = append(content.Files, File{Name: name, Data: data[name]})
		for _, part := range [][]byte{[]byte(name), data[name]} {
			// The lengths keep the end of one part from passing as the beginning of the next.
			sum.Write(binary.BigEndian.AppendUint64(nil, uint64(len(part))))
			sum.Write(part)
		}
	}
	content.Digest = "sha256:" + hex.EncodeToString(sum.Sum(nil))
	return content
}
