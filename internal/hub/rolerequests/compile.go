package rolerequests

import (
	"bytes"
	"encoding/json"
	"fmt"

	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/phase"
	"github.com/towline/towline/internal/source"
)

const (
	kindRole        = "Role"
	kindClusterRole = "ClusterRole"
)

// Compile returns the manifest with the Roles and ClusterRoles in contents, and a binding to the ServiceAccount of
// request for each. Errors are phase.TerminalError.
func Compile(request *libv1beta1.RoleRequest, contents []source.Content) ([]byte, error) {
	var manifest bytes.Buffer
	manifest.WriteString("# The Roles of RoleRequest " + request.Name + "\n")
	compiled := map[kube.Ref]bool{}
	for _, content := range contents {
		if content.Template || content.Lua {
			return nil, phase.TerminalErrorf("%s: roleRefs cannot be templates or scripts", content.Reference)
		}
		for _, file := range content.Files {
			err := appendFile(&manifest, request, file, compiled)
			origin := fmt.Sprintf("%s, %s", content.Reference, file.Name)
			if err != nil && content.Sensitive {
				return nil, source.HideDetails(origin, err)
			}
			if err != nil {
				return nil, fmt.Errorf("%s: %w", origin, err)
			}
		}
	}
	return manifest.Bytes(), nil
}

// appendFile appends the Roles and ClusterRoles in a file, with their bindings, to the manifest, and adds them to
// compiled. Errors are phase.TerminalError.
func appendFile(manifest *bytes.Buffer, request *libv1beta1.RoleRequest, file source.File, compiled map[kube.Ref]bool) error {
	roles, err := kube.DecodeManifest(file.Data)
	if err != nil {
		return phase.TerminalError{Err: err}
	}
	for _, role := range roles {
		if err := checkRole(role); err != nil {
			return phase.TerminalError{Err: err}
		}
		if compiled[kube.RefOf(role).Key()] {
			return phase.TerminalErrorf("%s is in roleRefs twice", kube.RefOf(role))
		}
		compiled[kube.RefOf(role).Key()] = true
		if err := appendRole(manifest, request, role); err != nil {
			return err
		}
	}
	return nil
}

// checkRole returns an error unless role is a complete Role or ClusterRole.
func checkRole(role *unstructured.Unstructured) error {
	kind, ref := role.GetKind(), kube.RefOf(role)
	switch {
	case role.GroupVersionKind().GroupVersion() != rbacv1.SchemeGroupVersion || kind != kindRole && kind != kindClusterRole:
		return fmt.Errorf("%s is neither a Role nor a ClusterRole of %s", ref, rbacv1.SchemeGroupVersion)
	case role.GetName() == "":
		return fmt.Errorf("a %s has no name", kind)
	case kind == kindRole && role.GetNamespace() == "":
		return fmt.Errorf("%s has no namespace", ref)
	case kind == kindClusterRole && role.GetNamespace() != "":
		return fmt.Errorf("%s has a namespace", ref)
	}
	return nil
}

// appendRole renames a Role or ClusterRole, and appends it and its binding to the manifest.
func appendRole(manifest *bytes.Buffer, request *libv1beta1.RoleRequest, role *unstructured.Unstructured) error {
	// The name of a RoleRequest has no colon, so no two RoleRequests have Roles of the same name.
	role.SetName("rolerequest:" + request.Name + ":" + role.GetName())
	binding := &rbacv1.RoleBinding{
		TypeMeta:   metav1.TypeMeta{APIVersion: rbacv1.SchemeGroupVersion.String(), Kind: role.GetKind() + "Binding"},
		ObjectMeta: metav1.ObjectMeta{Namespace: role.GetNamespace(), Name: role.GetName()},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: role.GetKind(), Name: role.GetName()},
		Subjects: []rbacv1.Subject{{
			Kind: rbacv1.ServiceAccountKind, Namespace: request.Spec.ServiceAccountNamespace, Name: request.Spec.ServiceAccountName,
		}},
	}
	for _, object := range []any{role.Object, binding} {
		document, err := json.Marshal(object)
		if err != nil {
			return phase.TerminalErrorf("encode %s: %w", role.GetName(), err)
		}
		manifest.WriteString("---\n")
		manifest.Write(document)
		manifest.WriteByte('\n')
	}
	return nil
}
