package register

import (
	"context"
	"fmt"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/apiutil"

	"github.com/towline/towline/internal/kube"
)

// resident is what there is of an agent in a namespace of the cluster; nil is what is not there.
type resident struct {
	namespace  string
	deployment *appsv1.Deployment
	secret     *corev1.Secret
	account    *corev1.ServiceAccount
}

// resident looks for an agent in a namespace.
func (m member) resident(ctx context.Context, namespace, agentName string) (resident, error) {
	r := resident{namespace: namespace, deployment: &appsv1.Deployment{}, secret: &corev1.Secret{}, account: &corev1.ServiceAccount{}}
	found, err := m.find(ctx, client.ObjectKey{Namespace: namespace, Name: agentName}, r.deployment)
	if err != nil {
		return r, err
	}
	if !found {
		r.deployment = nil
	}
	if found, err = m.find(ctx, r.secretKey(), r.secret); err != nil {
		return r, err
	}
	if !found {
		r.secret = nil
	}
	if found, err = m.find(ctx, client.ObjectKey{Namespace: namespace, Name: AgentAccount}, r.account); err != nil {
		return r, err
	}
	if !found {
		r.account = nil
	}
	return r, nil
}

// find reads an object into obj and says whether it is there.
func (m member) find(ctx context.Context, key client.ObjectKey, obj client.Object) (bool, error) {
	err := m.Get(ctx, key, obj)
	if client.IgnoreNotFound(err) != nil {
		return false, fmt.Errorf("read %s on the cluster: %w", named(key, obj), err)
	}
	return !apierrors.IsNotFound(err), nil
}

// named names the object of a key for people.
func named(key client.ObjectKey, obj client.Object) kube.Ref {
	ref := kube.Ref{Namespace: key.Namespace, Name: key.Name}
	if kind, err := apiutil.GVKForObject(obj, kube.Scheme()); err == nil {
		ref.Group, ref.Version, ref.Kind = kind.Group, kind.Version, kind.Kind
	}
	return ref
}

// argument returns the value of a flag on the agent's command line.
func (r resident) argument(flag string) string {
	if r.deployment == nil {
		return ""
	}
	for _, container := range r.deployment.Spec.Template.Spec.Containers {
		words := slices.Concat(container.Command, container.Args)
		if i := slices.IndexFunc(words, func(word string) bool { return strings.HasPrefix(word, flag) }); i >= 0 {
			return strings.TrimPrefix(words[i], flag)
		}
	}
	return ""
}

// secretKey names the Secret with the way to the control plane.
func (r resident) secretKey() client.ObjectKey {
	if namespace, name, ok := strings.Cut(r.argument(secretFlag), "/"); ok {
		return client.ObjectKey{Namespace: namespace, Name: name}
	}
	return client.ObjectKey{Namespace: r.namespace, Name: KubeconfigSecret}
}

// cluster names the Cluster that the agent is of, as far as anything that is there says so; "" otherwise.
func (r resident) cluster() string {
	if name := r.argument(clusterFlag); name != "" {
		return name
	}
	if r.secret != nil {
		if name := r.secret.Labels[RegistrationLabel]; name != "" {
			return name
		}
		if loaded, err := clientcmd.Load(r.secret.Data[KubeconfigKey]); err == nil {
			if current := loaded.Contexts[loaded.CurrentContext]; current != nil {
				return current.AuthInfo
			}
		}
	}
	if r.account != nil {
		return r.account.Labels[RegistrationLabel]
	}
	return ""
}

// empty says that nothing is there.
func (r resident) empty() bool { return r.deployment == nil && r.secret == nil && r.account == nil }

// unfinished says that what is there is of a registration that did not get through.
func (r resident) unfinished() bool {
	return r.secret != nil && r.secret.Annotations[unfinishedAnnotation] != ""
}
